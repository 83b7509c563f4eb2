"""Bad settings, handlers, event types, policies and URLs: each is refused at the place where it is given."""

from __future__ import annotations

import dataclasses
import functools
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import pytest

from aiodelay import (
    AiodelayError,
    ConfigurationError,
    Conflict,
    Context,
    Cron,
    DuplicateHandlerError,
    Every,
    HandlerSignatureError,
    Late,
    Later,
    MissingExtraError,
    Reject,
    Retry,
    Scheduler,
    ScheduleTimeError,
    event,
)
from aiodelay.backends import registry
from aiodelay.backends.stdout import StdoutSink, open_stdout
from aiodelay.errors import masked_url, shortened
from aiodelay.memory import MemoryStore, open_store
from tests.support.clear_errors import PASSWORD, PAYLOAD, Bad, Pay, assert_clear, assert_no_secret

Call: TypeAlias = Callable[[], object]
Rows: TypeAlias = dict[str, tuple[Call, Bad]]


def setting(name: str, value: str, allowed: str, error: type[AiodelayError] = ConfigurationError) -> Bad:
    return Bad(error, name, value, allowed)


# --- the scheduler ----------------------------------------------------------------------------------------


def scheduler(store: object = None, **settings: object) -> Scheduler:
    options: dict[str, Any] = settings
    return Scheduler(MemoryStore() if store is None else store, **options)  # type: ignore[arg-type]


async def tell(alarm: object) -> None: ...


def given(bad: Bad, **settings: object) -> tuple[Call, Bad]:
    return lambda: scheduler(**settings), bad


NAMESPACE = setting("namespace", "", "1 to 64 characters of A-Z a-z 0-9 . _ -")
LIMIT = setting("max_payload", "", "an integer from 1 to 1000000000")
TARGETS = setting("allowed_targets", "", "'<sink>:<address>', or the beginning of such a text and '*'")
LANE = setting("lanes", "", "1 to 128 characters")
SETTINGS: Rows = {
    **{
        f"namespace {name!r:.20}": given(NAMESPACE, namespace=name)
        for name in (
            "",
            "a b",
            "{x}",
            "a}",
            "a:b",
            "a/b",
            "a\n",
            "é",
            "a" * 65,
            "a" * 1_000_000,
            "\ud800",
            5,
            None,
            True,
        )
    },
    "store is a number": given(setting("store", "an int", "a URL such as 'sqlite:///delay.db', or a Store"), store=5),
    "store is a path": given(setting("store", "Path", "a URL"), store=Path("delay.db")),
    "store is a class": given(setting("store", "a type", "a URL"), store=int),
    "store without scheme": given(setting("store", "'delay.db'", "a URL that begins with one of"), store="delay.db"),
    "store without anything": given(setting("store", "''", "a URL that begins with one of"), store=""),
    "store of http": given(
        setting("scheme of store http://me:***@host/x", "'http'", ""), store=f"http://me:{PASSWORD}@host/x"
    ),
    "store without slashes": given(
        setting("scheme of store redis9:***@host", "'redis9'", ""), store=f"redis9:{PASSWORD}@host"
    ),
    "store in capitals": given(setting("scheme of store MEMORY://", "'MEMORY'", ""), store="MEMORY://"),
    "sink of http": given(setting("scheme of sink http://u:***@h", "'http'", ""), sinks=[f"http://u:{PASSWORD}@h"]),
    "sinks as text": given(setting("sinks", "'stdout:'", "a collection, such as ['stdout:']"), sinks="stdout:"),
    "sinks as number": given(setting("sinks", "5", "a collection"), sinks=5),
    "no sinks": given(setting("sinks", "None", "a collection"), sinks=None),
    "sink is a number": given(
        setting("sinks", "a collection with an int", "URLs such as 'stdout:', and Sinks"), sinks=[5]
    ),
    "sinks of one name": given(
        setting("sinks", "two sinks named 'stdout'", "one sink per name"), sinks=[StdoutSink(), StdoutSink()]
    ),
    "dispatch as text": given(setting("dispatch", "'no'", "True or False"), dispatch="no"),
    "dispatch as number": given(setting("dispatch", "0", "True or False"), dispatch=0),
    "lanes as text": given(setting("lanes", "'pay'", "a collection"), lanes="pay"),
    "lanes as number": given(setting("lanes", "5", "a collection"), lanes=5),
    "lane with space": given(LANE, lanes=["a b"]),
    "lane is a class": given(LANE, lanes=[Pay]),
    "encoding": given(setting("encoding", "'xml'", "'json' or 'msgpack'"), encoding="xml"),
    "no encoding": given(setting("encoding", "None", "'json' or 'msgpack'"), encoding=None),
    "retry as number": given(setting("retry", "an int", "a Retry"), retry=5),
    "retry as false": given(setting("retry", "a bool", "a Retry"), retry=False),
    "retry as class": given(setting("retry", "a type", "a Retry"), retry=Retry),
    **{
        f"max_payload {shortened(number)}": given(LIMIT, max_payload=number)
        for number in (0, -1, True, "1", 1.5, float("nan"), None, 1_000_000_001, 10**5000)
    },
    "targets as text": given(setting("allowed_targets", "'sink:x'", "a collection"), allowed_targets="sink:x"),
    "targets as number": given(setting("allowed_targets", "5", "a collection"), allowed_targets=5),
    **{
        f"target {target!r}": given(TARGETS, allowed_targets=["sink:x", target])
        for target in ("", "sink", "*", "si*nk:x", "*:x", "sink:a*b", b"sink:x", 5, None)
    },
    "no time": given(setting("store_timeout", "'0s'", "at least 1ms"), store_timeout="0s"),
    "timeout as number": given(setting("store_timeout", "10", 'timedelta(seconds=5) or "5s"'), store_timeout=10),
    "timeout in words": given(setting("store_timeout", "'soon'", "text such as"), store_timeout="soon"),
    "open in words": given(setting("open_timeout", "'soon'", "text such as"), open_timeout="soon"),
    "open as number": given(setting("open_timeout", "30", 'timedelta(seconds=5) or "5s"'), open_timeout=30),
    "open before": given(setting("open_timeout", "'-1s', which is negative", "at least 0s"), open_timeout="-1s"),
    "drain": given(setting("drain", "'-1s', which is negative", "at least 0s"), drain="-1s"),
    "claim_ahead": given(setting("claim_ahead", "'yes'", "True or False"), claim_ahead="yes"),
    "alarm": given(setting("overdue_alarm", "'0s'", "at least 1ms"), overdue_alarm="0s"),
    "on_alarm": given(setting("on_alarm", "a str", "a plain function that takes an Alarm"), on_alarm="log"),
    "async on_alarm": given(setting("on_alarm", "a coroutine function", "a plain function"), on_alarm=tell),
    "telemetry": given(setting("telemetry", "a bool", "a Telemetry"), telemetry=True),
    "clock": given(setting("clock", "a datetime", "a Clock"), clock=datetime(2031, 1, 1)),  # noqa: DTZ001
}


# --- handlers ---------------------------------------------------------------------------------------------


class Left(msgspec.Struct):
    a: int


class Right(msgspec.Struct):
    b: int


class Either(msgspec.Struct):
    side: Left | Right


@dataclasses.dataclass
class Unresolved:
    field: Missing  # type: ignore[name-defined]  # noqa: F821


@dataclasses.dataclass
class Needy:
    card: str


@dataclasses.dataclass
class Raising:
    def __post_init__(self) -> None:
        raise RuntimeError("not today")


def handler(function: object, bad: Bad, **options: object) -> tuple[Call, Bad]:
    arguments: dict[str, Any] = options
    return lambda: scheduler().add_handler(function, **arguments), bad  # type: ignore[arg-type]


async def good(event: Pay, context: Context) -> None: ...
async def no_parameters() -> None: ...
async def only_keyword(*, event: Pay) -> None: ...
async def variadic(*events: Pay) -> None: ...
async def bare(event) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001
async def of_text(event: str) -> None: ...
async def of_dict(event: dict[str, Any]) -> None: ...
async def of_two(event: Left | Right) -> None: ...
async def of_many(event: set[Pay]) -> None: ...
async def of_anything(event: Any) -> None: ...  # noqa: ANN401
async def of_missing(event: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
async def context_first(context: Context, event: Pay) -> None: ...
async def two_contexts(event: Pay, one: Context, two: Context) -> None: ...
async def extra(event: Pay, context: Context, database: object) -> None: ...
async def extra_keyword(event: Pay, *, database: object) -> None: ...
async def of_bytes(event: bytes) -> None: ...
async def of_either(event: Either) -> None: ...
async def of_unresolved(event: Unresolved) -> None: ...
async def of_needy(event: Needy) -> None: ...
async def of_raising(event: Raising) -> None: ...


def generator(event: Pay) -> Iterator[None]:
    yield


async def async_generator(event: Pay) -> AsyncIterator[None]:
    yield


class Generates:
    async def __call__(self, event: Pay) -> AsyncIterator[None]:
        yield


def bad_syntax(event: Pay) -> None: ...


bad_syntax.__annotations__["event"] = "Pay Pay"


def signature(
    function: str, value: str, allowed: str = "a first positional parameter annotated with a dataclass"
) -> Bad:
    return Bad(HandlerSignatureError, f"handler {function}", value, allowed)


FILLED = "the event, one parameter annotated Context, dependencies, and parameters with defaults"
CONCURRENCY = setting("handler concurrency", "", "an integer from 1 to 10000")
HANDLERS: Rows = {
    "number": handler(5, Bad(HandlerSignatureError, "handler", "an int", "a function")),
    "text": handler("good", Bad(HandlerSignatureError, "handler", "a str", "a function")),
    "no parameters": handler(no_parameters, signature("no_parameters", "without an event parameter")),
    "only keywords": handler(only_keyword, signature("only_keyword", "without an event parameter")),
    "variadic": handler(variadic, signature("variadic", "without an event parameter")),
    "not annotated": handler(bare, signature("bare", "whose event parameter 'event' has no annotation")),
    "lambda": handler(lambda event: None, signature("<lambda>", "'event' has no annotation")),
    "partial": handler(functools.partial(extra), signature("extra", "'database', which nothing can fill", FILLED)),
    "partial of the event": handler(
        functools.partial(good, event=Pay()), signature("good", "without an event parameter")
    ),
    "str": handler(of_text, signature("of_text", "'event' is annotated <class 'str'>")),
    "dict": handler(of_dict, signature("of_dict", "'event' is annotated dict[str, typing.Any]")),
    "union": handler(of_two, signature("of_two", "annotated ")),
    "set": handler(of_many, signature("of_many", "annotated set[")),
    "Any": handler(of_anything, signature("of_anything", "annotated typing.Any")),
    "unresolved": handler(of_missing, signature("of_missing", "NameError: name 'Missing' is not", "that resolve")),
    "syntax": handler(bad_syntax, signature("bad_syntax", "SyntaxError", "that resolve")),
    "context first": handler(context_first, signature("context_first", "'context' is annotated <class")),
    "two contexts": handler(two_contexts, signature("two_contexts", "'two', which nothing can fill", FILLED)),
    "extra": handler(extra, signature("extra", "'database', which nothing can fill", FILLED)),
    "extra keyword": handler(extra_keyword, signature("extra_keyword", "'database', which nothing can fill", FILLED)),
    "generator": handler(generator, signature("generator", "a generator", "a coroutine function")),
    "async generator": handler(async_generator, signature("async_generator", "a generator", "a coroutine function")),
    "partial of a generator": handler(
        functools.partial(async_generator), signature("async_generator", "a generator", "a coroutine function")
    ),
    "object that generates": handler(Generates(), signature("Generates", "a generator", "a coroutine function")),
    "built-in": handler(print, signature("print", "without an event parameter")),
    "bytes without name": handler(of_bytes, signature("of_bytes", "a handler of bytes without a name", "name='...'")),
    "bytes, bad name": handler(of_bytes, setting("handler name", "'a b'", "1 to 128 characters"), name="a b"),
    "typed with name": handler(good, setting("handler name", "'pay'", "name Pay with @event(...)"), name="pay"),
    "union inside": handler(
        of_either, signature("of_either", "given the event type Either, which cannot be", "fields of")
    ),
    "unresolved inside": handler(of_unresolved, signature("of_unresolved", "NameError: name 'Missing'", "fields of")),
    **{
        f"concurrency {shortened(number)}": handler(good, CONCURRENCY, concurrency=number)
        for number in (0, -1, 10_001, True, 1.5, "4", None, 10**5000)
    },
    "no time": handler(good, setting("handler timeout", "'0s'", "at least 1ms"), timeout="0s"),
    "time as number": handler(good, setting("handler timeout", "30", "a bare number has no unit"), timeout=30),
    "retry as number": handler(good, setting("retry", "an int", "a Retry"), retry=5),
    "retry as false": handler(good, setting("retry", "a bool", "a Retry"), retry=False),
    "every as text": handler(good, Bad(ScheduleTimeError, "every", "'10m'", "Every('10m') or Cron("), every="10m"),
    "every of bytes": handler(
        of_bytes, setting("every", "given to a handler of bytes", "without arguments"), name="x", every=Every("1m")
    ),
    "every of needy": handler(
        of_needy,
        setting("every", "handler of Needy, whose event type raises TypeError", "without arguments"),
        every=Every("1m"),
    ),
    "every of raising": handler(
        of_raising,
        setting("every", "handler of Raising, whose event type raises Runtime", "without arguments"),
        every=Every("1m"),
    ),
    "concurrency of nothing": (
        lambda: scheduler().set_concurrency("pay", 5),
        setting("handler", "'pay'", "none (no handler was added)"),
    ),
}


# --- event types and policies -----------------------------------------------------------------------------


def refused(
    call: Call, name: str, value: str, allowed: str, error: type[AiodelayError] = ConfigurationError
) -> tuple[Call, Bad]:
    return call, Bad(error, name, value, allowed)


def name_function() -> object:
    return event("pay")(good)  # type: ignore[arg-type]


TYPE_NAME = "1 to 128 characters without spaces, control characters"
NAMES: Rows = {
    **{
        f"name {name!r:.20}": refused(lambda name=name: event(name), "event name", "", TYPE_NAME)  # type: ignore[misc]
        for name in (
            "",
            " ",
            "a b",
            "a:b",
            "{a}",
            "a\x00",
            "a\x85",
            "a\u2028",
            "a\xa0b",
            "\ud800",
            "a" * 129,
            "a" * 10**6,
            5,
        )
    },
    "without call": refused(lambda: event(Pay), "event name", "Pay", TYPE_NAME),  # type: ignore[arg-type]
    "alias": refused(lambda: event("a", aliases=("b c",)), "event alias", "'b c'", TYPE_NAME),
    "aliases as text": refused(
        lambda: event("a", aliases="bc"),  # type: ignore[arg-type]
        "event aliases",
        "'bc'",
        "a collection",
    ),
    "alias twice": refused(lambda: event("a", aliases=("b", "b")), "event aliases", "('b', 'b')", "differ from each"),
    "alias is name": refused(lambda: event("a", aliases=("a",)), "event aliases", "('a',)", "differ from each other"),
    "on a function": refused(name_function, "@event", "given to a function", "a class"),
}


def retry(name: str, value: str, allowed: str, **options: object) -> tuple[Call, Bad]:
    arguments: dict[str, Any] = options
    return lambda: Retry(**arguments), setting(f"retry.{name}", value, allowed)


def intervals(value: object, name: str, shown: str, allowed: str) -> tuple[Call, Bad]:
    return lambda: Retry.intervals(value), setting(f"retry.{name}", shown, allowed)  # type: ignore[arg-type]


RETRIES: Rows = {
    **{
        f"attempts {n!r}": retry("attempts", repr(n), "a whole number from 1 to 1000", attempts=n)
        for n in (0, -1, 1001, True, 1.5, "3", None)
    },
    **{
        f"factor {n!r}": retry("factor", repr(n), "a finite number >= 1", factor=n)
        for n in (0, 0.9, -1, float("nan"), float("inf"), True, "2")
    },
    **{
        f"jitter {n!r}": retry("jitter", repr(n), "a number from 0 to 1", jitter=n)
        for n in (-0.1, 1.1, 2, float("nan"), float("inf"), True, "0.5")
    },
    "first as number": retry("first", "5", "a bare number has no unit", first=5),
    "first negative": retry("first", "'-5s', which is negative", "a duration of at least 0s", first="-5s"),
    "cap below first": retry("cap", "'1s'", "at least retry.first, which is 5s", cap="1s"),
    "by_type as list": retry(
        "by_type", "a list", "a mapping from exception types to Retry", by_type=[(ValueError, Retry())]
    ),
    "by_type of text": (
        lambda: Retry(by_type={"ValueError": Retry()}),  # type: ignore[dict-item]
        setting("a key of retry.by_type", "'ValueError'", "an exception type"),
    ),
    "by_type of int": (
        lambda: Retry(by_type={int: Retry()}),  # type: ignore[dict-item]
        setting("a key of retry.by_type", "int", "an exception type"),
    ),
    "plan as number": (
        lambda: Retry(by_type={ValueError: 5}),  # type: ignore[dict-item]
        setting("retry.by_type[ValueError]", "5", "a Retry, or Retry.never()"),
    ),
    "plans in plans": (
        lambda: Retry(by_type={ValueError: Retry(by_type={KeyError: Retry.never()})}),
        setting(
            "retry.by_type[ValueError]", "a by_type of its own", "put every type into the by_type of the outer Retry"
        ),
    ),
    "no intervals": intervals([], "intervals", "[]", "1 to 999 durations"),
    "intervals as text": intervals("5s", "intervals", "'5s'", "1 to 999 durations"),
    "intervals as number": intervals(5, "intervals", "5", "1 to 999 durations"),
    "1000 intervals": intervals(["1s"] * 1000, "intervals", "a list", "1 to 999 durations"),
    "interval as number": intervals(["1s", 5], "intervals[1]", "5", "a bare number has no unit"),
}


def rule(call: Call, name: str, value: str, allowed: str) -> tuple[Call, Bad]:
    return call, Bad(ScheduleTimeError, f"every.{name}", value, allowed)


NAIVE, FIVE = datetime(2031, 1, 1), "five fields"  # noqa: DTZ001
POLICIES: Rows = {
    "every 0 s": rule(lambda: Every("0s"), "interval", "'0s'", "at least 100ms"),
    "every 99 ms": rule(lambda: Every("99ms"), "interval", "'99ms'", "at least 100ms"),
    "every 5": rule(lambda: Every(5), "interval", "5", "a bare number has no unit"),  # type: ignore[arg-type]
    "every, naive": rule(lambda: Every("1m", start=NAIVE), "start", "the naive datetime", "timezone-aware"),
    "every, missed": rule(lambda: Every("1m", missed="later"), "missed", "'later'", "'coalesce', 'all', 'skip'"),  # type: ignore[arg-type]
    "every, overlap": rule(lambda: Every("1m", overlap=[]), "overlap", "[]", "'allow', 'skip'"),  # type: ignore[arg-type]
    "cron of nothing": rule(lambda: Cron(""), "expression", "''", FIVE),
    "cron of six": rule(lambda: Cron("0 0 9 * * mon"), "expression", "'0 0 9", "for a rule in seconds, use Every"),
    "cron, minute 61": rule(lambda: Cron("61 9 * * mon"), "expression", "'61 9", FIVE),
    "cron, 30 February": rule(lambda: Cron("0 0 30 2 *"), "expression", "'0 0 30 2 *'", ""),
    "cron, 10^6": rule(lambda: Cron("0" * 1_000_000), "expression", "000…000", FIVE),
    "cron, number": rule(lambda: Cron(5), "expression", "5", FIVE),  # type: ignore[arg-type]
    **{
        f"cron in {zone!r}": rule(lambda zone=zone: Cron("0 9 * * *", tz=zone), "tz", "", "IANA")  # type: ignore[misc]
        for zone in (
            "",
            "Mars/Olympus",
            "localtime",
            "../etc/passwd",
            "/etc/localtime",
            "a\x00",
            "\ud800",
            "a" * 10**6,
            None,
            1,
        )
    },
    "later 5": refused(lambda: Later(5), "Later.delay", "5", "a bare number has no unit"),  # type: ignore[arg-type]
    "later -1 s": refused(lambda: Later("-1s"), "Later.delay", "'-1s', which is negative", "at least 0s"),
    "later that may count": refused(lambda: Later("1s", counts="no"), "Later.counts", "'no'", "True or False"),  # type: ignore[arg-type]
    "reject nothing": refused(lambda: Reject(""), "Reject.reason", "''", "a non-empty str"),
    "reject an error": refused(lambda: Reject(ValueError(PAYLOAD)), "Reject.reason", "a ValueError", "a non-empty"),  # type: ignore[arg-type]
    **{
        f"version {n!r}": refused(lambda n=n: Conflict.newer(n), "conflict.version", "", "an integer from 0 to 2**63-1")  # type: ignore[misc]
        for n in (-1, 1 << 63, True, 1.5, "7", None)
    },
    "drop": refused(lambda: Late.drop("soon"), "late.after", "'soon'", "text such as"),
    "dead letter": refused(lambda: Late.dead_letter(after=15), "late.after", "15", "a bare number"),  # type: ignore[arg-type]
}


# --- URLs -------------------------------------------------------------------------------------------------


def memory(url: str) -> Call:
    return lambda: open_store(url, namespace="default", clock=None)


JOURNAL = "an integer from 0 to 10000000"
OPTIONS: Rows = {
    **{
        f"journal={text!r:.20}": refused(
            memory(f"memory://?journal={text}"), f"journal in {masked_url(f'memory://?journal={text}')}", "", JOURNAL
        )
        for text in ("", "x", "-1", "1.5", "10000001", "9" * 5000, "\u0665", "0x1", "1_000")
    },
    "given twice": refused(
        memory("memory://?journal=1&journal=2"),
        "an option of memory://?journal=1&journal=2",
        "given twice",
        "each option once",
    ),
    "unknown": refused(memory("memory://?jornal=1"), "option of memory://?jornal=1", "'jornal'", "journal"),
    "secret": refused(
        memory(f"memory://?api_key={PASSWORD}"), "option of memory://?api_key=***", "'api_key'", "journal"
    ),
    "URL as name": refused(
        memory(f"memory://?redis://u:{PASSWORD}@host=1"),
        "option of memory://?redis:***@host=1",
        "'redis://u:***@host'",
        "journal",
    ),
    "URL as value": refused(
        memory(f"memory://?journal=redis://u:{PASSWORD}@host"),
        "journal in memory://?journal=redis:***@host",
        "'redis://u:***@host'",
        JOURNAL,
    ),
    "host": refused(
        memory(f"memory://u:{PASSWORD}@host"), "url", "memory://u:***@host", "'memory:' without host or path"
    ),
    "path": refused(memory("memory:///delay.db"), "url", "memory:///delay.db", "'memory:' without host or path"),
    "fragment": refused(memory("memory://#x"), "url", "memory://#x", "'memory:' without host or path"),
    "unreadable": refused(memory(f"memory://u:{PASSWORD}@[host"), "url", "memory://u:***@[host", "a URL"),
    "unreadable name": refused(
        memory(f"memory://u:{PASSWORD}@ho\u2100st"), "url", "memory://u:***@ho\u2100st", "a URL"
    ),
    "stdout": refused(lambda: open_stdout("stdout:x"), "url", "stdout:x", "'stdout:' without host or path"),
    "stdout, option": refused(lambda: open_stdout("stdout:?a=1"), "option of stdout:?a=1", "'a'", "none"),
}

ALL = [
    pytest.param(call, bad, id=f"{group}: {name}")
    for group, rows in {
        "scheduler": SETTINGS,
        "handler": HANDLERS,
        "event": NAMES,
        "retry": RETRIES,
        "policy": POLICIES,
        "url": OPTIONS,
    }.items()
    for name, (call, bad) in rows.items()
]


@pytest.mark.parametrize(("call", "bad"), ALL)
def test_bad_setting(call: Call, bad: Bad, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(bad.error) as caught:
        call()
    assert_clear(caught.value, bad)
    assert_no_secret(caught.value, caplog.text)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("redis://user:{}@host:6379/0", "redis://user:***@host:6379/0"),
        ("redis://:{}@host", "redis://:***@host"),
        ("redis://user:{}/x@host", "redis://user:***@host"),
        ("redis://user:{}#x@host", "redis://user:***@host"),
        ("redis://user:{}?x@host", "redis://user:***@host"),
        ("redis://user:a@{}@host", "redis://user:***@host"),
        ("redis://user:a:{}@host", "redis://user:***@host"),
        ("redis:{}@host", "redis:***@host"),
        ("{}@host", "***@host"),
        ("redis://user:{}", "redis://user:***"),
        ("redis://user:{}?x", "redis://user:***?x"),
        ("redis://user:{}?a=b:1", "redis://user:***?a=b:1"),
        ("redis://user:{}@[::1", "redis://user:***@[::1"),
        ("redis://host/0?password={}&db=1", "redis://host/0?password=***&db=1"),
        ("redis://host/0?a=1&Sasl_PWD={}@x#f", "redis://host/0?a=1&Sasl_PWD=***"),
        ("redis://host/0?pass%77ord={}", "redis://host/0?pass%77ord=***"),
        ("redis://host/0?access_token={};x=1", "redis://host/0?access_token=***;x=1"),
        ("redis://user:{}@host/\n\u202e\ud800", r"redis://user:***@host/\n\u202e\ud800"),
    ],
)
def test_passwords_in_urls_are_masked(url: str, masked: str) -> None:
    assert masked_url(url.format(PASSWORD)) == masked


@pytest.mark.parametrize(
    "url",
    [
        *(
            "memory://",
            "stdout:",
            "sqlite:///delay.db",
            "sqlite:////var/lib/delay.db?journal=5",
            "sqlite:///C:/delay.db",
        ),
        *("kafka://a:9092,b:9092/topic", "redis://host:6379/0?db=1", "redis://[::1]:6379/0", "redis://user@host", ""),
        *("redis://host?durability=replicated:2", "redis+cluster://a:1,b:2?announce=c:3=d:4&durability=replicated:2"),
    ],
)
def test_what_is_no_secret_is_shown(url: str) -> None:
    assert masked_url(url) == url


def test_masked_urls_are_short() -> None:
    assert len(masked_url("redis://" + "x" * 1_000_000)) < 250


@pytest.mark.parametrize(
    ("module", "package", "client", "extra"),
    [
        ("aiodelay.redis", "aiodelay.redis", "redis", "redis"),
        ("aiodelay.kafka", "aiodelay.kafka", "aiokafka", "kafka"),
        ("aiodelay.delay_box", "aiodelay.delay_box", "aiokafka", "kafka"),
        ("aiodelay.service", "aiodelay.service", "fastapi", "service"),
        ("aiodelay.spark.jobs.backfill", "aiodelay.spark", "pyspark", "spark-local"),
        ("aiodelay.spark.jobs.reconcile", "aiodelay.spark", "pyspark", "spark-local"),
        ("aiodelay.spark.engine", "aiodelay.spark", "pyspark", "spark-local"),
        ("aiodelay.spark.session", "aiodelay.spark", "pyspark", "spark-local"),
    ],
)
def test_importing_what_an_extra_brings_says_what_to_install(
    module: str, package: str, client: str, extra: str
) -> None:
    program = f"import sys; sys.modules[{client!r}] = None; import {module}"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(f"aiodelay.errors.MissingExtraError: {package} is missing {client}")
    assert last.endswith(f"; allowed: pip install 'aiodelay[{extra}]'")


def test_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> object:
            raise ModuleNotFoundError("No module named 'redis'", name="redis")

    class Points(dict[str, Point]):
        names = frozenset({"redis"})

    monkeypatch.setattr(registry, "entry_points", lambda group: Points(redis=Point()))
    with pytest.raises(MissingExtraError) as caught:
        Scheduler(f"redis://u:{PASSWORD}@host")
    expected = Bad(MissingExtraError, "store redis://u:***@host", "missing redis", "pip install 'aiodelay[redis]'")
    assert_clear(caught.value, expected)
    assert isinstance(caught.value, ImportError)


# --- two of a kind ----------------------------------------------------------------------------------------


@event("pay.checked", aliases=("pay.old",))
@dataclasses.dataclass
class Checked:
    card: str = ""


@event("pay.old")
@dataclasses.dataclass
class Old:
    card: str = ""


async def checked(event: Checked) -> None: ...
async def old(event: Old) -> None: ...


def add(*functions: object, name: str | None = None, **settings: object) -> Call:
    def call() -> None:
        made = scheduler(**settings)
        for function in functions:
            made.add_handler(function, name=name)  # type: ignore[arg-type]

    return call


async def named_stdout(event: bytes) -> None: ...


@pytest.mark.parametrize(
    ("call", "bad"),
    [
        (
            add(good, good),
            setting(
                "handler",
                f"a second handler for 'Pay'; the first is {__name__}.good, line ",
                "one handler per event type",
                DuplicateHandlerError,
            ),
        ),
        (add(checked, old), setting("event type", "'pay.old', the name of both", "@event(...)", DuplicateHandlerError)),
        (add(old, checked), setting("event type", "'pay.old', the name of both", "@event(...)", DuplicateHandlerError)),
        (
            add(of_bytes, named_stdout, name="x"),
            setting("handler", "a second handler for 'x'", "one handler per event type", DuplicateHandlerError),
        ),
        (
            add(named_stdout, name="stdout", sinks=[StdoutSink()]),
            setting("handler", "named 'stdout', like a sink", "a name that no sink has", DuplicateHandlerError),
        ),
    ],
    ids=["decorated twice", "alias is a name", "name is an alias", "bytes of one name", "as a sink"],
)
def test_two_of_one_name(call: Call, bad: Bad) -> None:
    with pytest.raises(bad.error) as caught:
        call()
    assert_clear(caught.value, bad)


def test_a_refused_handler_leaves_no_trace() -> None:
    made = scheduler()
    with pytest.raises(ConfigurationError):
        made.add_handler(checked, concurrency=0)
    with pytest.raises(DuplicateHandlerError):
        made.add_handler(old)
    made.add_handler(checked)
    with pytest.raises(ConfigurationError, match=r"; allowed: pay\.checked$"):
        made.set_concurrency(Old, 5)


@pytest.mark.asyncio
async def test_lanes_that_name_nothing() -> None:
    made = scheduler(lanes=["Pay", "stdout"], sinks=[StdoutSink()])
    with pytest.raises(ConfigurationError) as caught:
        await made.__aenter__()
    assert_clear(caught.value, setting("lanes", "['Pay']", "names of handlers and sinks: stdout"))


@pytest.mark.asyncio
async def test_removing_what_is_not_there() -> None:
    with pytest.raises(ConfigurationError) as caught:
        await scheduler().remove_handler(Pay)
    assert_clear(caught.value, setting("handler", "Pay", "none (no handler was added)"))


def test_settings_at_their_limits_are_good() -> None:
    settings: list[dict[str, object]] = [
        {"namespace": "a" * 64},
        {"namespace": "A-z.0_9"},
        {"max_payload": 1},
        {"max_payload": 1_000_000_000},
        {"store_timeout": "1ms", "drain": "0s", "open_timeout": "0s", "overdue_alarm": "3650d"},
        {"open_timeout": None},
        {"allowed_targets": []},
        {"lanes": []},
        {"sinks": (StdoutSink(),)},
        {"encoding": "msgpack"},
    ]
    for options in settings:
        scheduler(**options)
    for concurrency in (1, 10_000):
        scheduler().add_handler(good, concurrency=concurrency, timeout="1ms")
    assert len(Retry(attempts=1000).delays_ms) == 999
    assert Every("100ms").interval_ms == 100
    assert Conflict.newer((1 << 63) - 1).version == (1 << 63) - 1
    event("a" * 128, aliases=("é", "支付", "a.b/c-d_e"))
