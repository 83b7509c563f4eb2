"""CLI commands for messages, lanes and dead letters on real stores: effects, output and exit codes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from msgspec.structs import replace

from aiodelay import Reject, Retry, Scheduler
from aiodelay.core.durations import LAST_MS
from aiodelay.core.values import PutBack
from tests.support.bad_inputs import BAD_MESSAGES, changed
from tests.support.clear_errors import HEADER, KEY, PAYLOAD, SECRETS
from tests.support.cli import Cli, Ran
from tests.support.kafka import create_topic, new_name
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until


@pytest.fixture(scope="module")
def redis(shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(redis_servers()[0])


@pytest.fixture(params=["sqlite", "redis"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    url = request.getfixturevalue("redis") if request.param == "redis" else f"sqlite:///{tmp_path}/delay.db"
    cli = Cli(url, tmp_path)
    cli.namespace = f"cli-{uuid4().hex[:8]}"
    return cli


def ids(ran: Ran) -> list[str]:
    assert ran.code == 0, ran.err
    return [each["id"] for each in ran.objects]


def add(cli: Cli, *names: str, delay: str = "2h", to: str = "handler:mail") -> None:
    lines = [json.dumps({"to": to, "payload": f"p {name}", "delay": delay, "id": name}) for name in names]
    assert cli("schedule", "--lines", stdin="\n".join(lines).encode()).code == 0


def give_up(cli: Cli, *names: str) -> None:
    """Have messages become dead letters, with the reason `rejected`."""
    add(cli, *names, delay="0s", to="handler:bad")

    async def play() -> None:
        scheduler = Scheduler(cli.url, namespace=cli.namespace)

        async def refuse(event: bytes) -> Reject:
            return Reject("no such order")

        scheduler.add_handler(refuse, name="bad")
        async with scheduler:
            async with asyncio.timeout(60):
                await scheduler.run_until_idle()

    asyncio.run(play())


# --- schedule, get, list ----------------------------------------------------------------------------------


def test_a_message_is_stored_as_the_options_say(cli: Cli) -> None:
    options = ["--delay", "2h", "--id", "a", "--key", "k", "--header", "x=1=2", "--drop-after", "15m", "--newer", "7"]
    ran = cli("schedule", "handler:mail", "größe", *options)
    assert ran.code == 0
    due = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"stored a, due {due} \(in (2h|1h59m(\d+s)?)\)\n", ran.out)
    shape = cli("get", "a", "--json").object
    wanted = {"to": "handler:mail", "payload": "größe", "key": "k", "headers": {"x": "1=2"}, "version": 7}
    assert shape.items() >= (wanted | {"late": {"drop": "15m"}, "state": "scheduled", "bytes": 7}).items()
    assert "größe" in cli("get", "a").out
    assert cli("schedule", "handler:mail", "older", "--delay", "1h", "--id", "a", "--newer", "6", "--json").code == 4
    assert cli("get", "a", "--json").object == shape


def test_an_instant_a_rule_and_bytes(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "payload").write_bytes(b"\xff\x00")
    file = ["--payload-file", str(tmp_path / "payload")]
    assert cli("schedule", "handler:b", *file, "--at", "2031-01-01T12:00:00+01:00", "--id", "b").code == 0
    rule = ["--every", "0 9 * * mon", "--tz", "Europe/Paris"]
    assert cli("schedule", "handler:s", "x", *rule, "--id", "s", "--json").object["outcome"] == "stored"
    shape = cli("get", "b", "--json").object
    assert (shape["payload_base64"], shape["due"]) == ("/wA=", "2031-01-01T11:00:00.000Z")
    every = cli("get", "s", "--json").object["every"]
    assert every == {"cron": "0 9 * * MON", "tz": "Europe/Paris", "missed": "coalesce", "overlap": "allow"}


def test_the_same_id_again(cli: Cli) -> None:
    for conflict, code, outcome in [("replace", 0, "stored"), ("replace", 0, "replaced"), ("keep", 0, "kept")]:
        ran = cli("schedule", "handler:m", "x", "--delay", "1h", "--id", "a", "--conflict", conflict, "--json")
        assert (ran.code, ran.object["outcome"]) == (code, outcome)
    for _ in range(2):
        ran = cli("schedule", "handler:m", "x", "--id", "b", "--conflict", "debounce:1h:2h", "--json")
        assert (ran.code, cli("get", "b", "--json").object["due"]) == (0, ran.object["due"])
    assert ran.object["outcome"] == "replaced"
    ran = cli("schedule", "handler:m", "x", "--delay", "1h", "--id", "a", "--conflict", "debounced", "--json")
    assert (ran.code, ran.out) == (2, "")
    assert "throttle:1h:last" in ran.error["detail"]
    ran = cli("schedule", "handler:m", "x", "--delay", "1h", "--id", "a", "--conflict", "error", "--json")
    assert (ran.code, ran.out, ran.error["error"]) == (4, "", "DuplicateIdError")


def test_a_message_due_after_the_year_9999_is_shown(cli: Cli) -> None:
    """Other programs may store such a message."""
    add(cli, "a")

    async def move() -> None:
        async with Scheduler(cli.url, namespace=cli.namespace, dispatch=False) as scheduler:
            found = await scheduler.get("a")
            assert found is not None
            far = replace(found.record, due_ms=LAST_MS + 1, envelope=replace(found.record.envelope, id="far"))
            await scheduler.store.put_back([PutBack(far, LAST_MS + 1)])

    asyncio.run(move())
    assert "9999-12-31 23:59:59.999Z" in cli("list").out
    assert "it is due on 9999-12-31 at 23:59:59.999Z" in cli("why", "far").out


def test_lines_that_are_refused_are_named_and_the_rest_is_stored(cli: Cli) -> None:
    good = [f'{{"to": "handler:m", "payload": "{i}", "delay": "1h", "id": "m{i}"}}' for i in range(1200)]
    lines = [
        *good[:1],
        "",
        "{",
        *good[1:700],
        '{"to": "nowhere:x", "payload": "a", "delay": "1h", "id": "n"}',
        *good[700:],
    ]
    ran = cli("schedule", "--lines", "--json", stdin="\n".join(lines).encode())
    assert (ran.code, ran.object) == (1, {"stored": 1200, "refused": 2})
    told = {each["line"]: each["error"] for each in map(json.loads, ran.err.splitlines())}
    assert told == {3: "InputError", 703: "UnknownSinkError"}
    assert len(ids(cli("list", "--json", "--limit", "5000"))) == 1200
    ran = cli("schedule", "--lines", stdin=b"{}\n")
    assert (ran.code, ran.out) == (1, "0 stored, 1 refused\n")
    assert ran.err == "line 1: payload is missing; allowed: payload or payload_base64\n"


def test_every_bad_message_of_the_table_is_refused_between_good_ones(tmp_path: Path) -> None:
    """Except destinations that are not allowed: the command has no such setting."""
    cli = Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)
    rows = [each for each in BAD_MESSAGES if each[1] != "TargetNotAllowedError"]
    good = [changed({"id": f"good-{n}"}) for n in range(len(rows))]
    lines = [line for (change, *_), fine in zip(rows, good, strict=True) for line in (changed(change), fine)]
    ran = cli("schedule", "--lines", "--json", stdin=b"\n".join(lines))
    assert (ran.code, ran.object) == (1, {"stored": len(good), "refused": len(rows)})
    told = sorted((json.loads(line) for line in ran.err.splitlines()), key=lambda each: each["line"])
    assert [each["line"] for each in told] == list(range(1, 2 * len(rows), 2))
    for each, (change, error, field, allowed) in zip(told, rows, strict=True):
        assert each["error"] == error, change
        assert field in each["detail"], each
        assert allowed in each["detail"], each
        assert each["detail"].isprintable()
    assert not [secret for secret in SECRETS if secret in ran.err]
    assert len(ids(cli("list", "--json", "--limit", "500"))) == len(good)


def test_list_by_lane_state_destination_and_time_goes_on_after_its_cursor(cli: Cli) -> None:
    add(cli, "a", "b", "c", delay="2h")
    add(cli, "d", delay="0s", to="handler:other")
    assert ids(cli("list", "--json")) == ["d", "a", "b", "c"]
    assert ids(cli("list", "--json", "--of", "other")) == ["d"]
    assert ids(cli("list", "--json", "--state", "overdue")) == ["d"]
    assert ids(cli("list", "--json", "--to", "handler:mail")) == ["a", "b", "c"]
    assert ids(cli("list", "--json", "--since", "2031-01-01T00:00:00Z")) == []
    first = cli("list", "--json", "--limit", "2")
    assert ids(first) == ["d", "a"]
    rest = cli("list", "--json", "--after", first.error["next"])
    assert (ids(rest), rest.err) == (["b", "c"], "")
    found = cli("list", "--json", "--state", "scheduled", "--limit", "2")
    assert (ids(found), found.error["examined"], found.error["of"]) == (["a", "b"], 2, 4)
    assert ids(cli("list", "--json", "--state", "scheduled", "--after", found.error["next"])) == ["c"]
    table = cli("list").lines
    assert [line.split()[:1] for line in table[:1]] == [["due"]]
    assert len(table) == 5


def test_ids_are_shown_on_one_line(cli: Cli) -> None:
    add(cli, "x\u202e\u00a0y")
    assert "x\\u202e\\xa0y" in cli("list").out
    assert "\u202e" not in cli("list").out + cli("get", "x\u202e\u00a0y").out


# --- changes ----------------------------------------------------------------------------------------------


def test_cancel_reschedule_and_fire(cli: Cli) -> None:
    add(cli, "a", "b", "c")
    assert cli("reschedule", "a", "--at", "2031-01-01T00:00:00Z").out == "rescheduled a\n"
    assert cli("get", "a", "--json").object["due"] == "2031-01-01T00:00:00.000Z"
    assert cli("fire", "b").out == "fired b\n"
    assert cli("get", "b", "--json").object["state"] == "overdue"
    ran = cli("cancel", "a", "none", "b", "--yes", "--json")
    assert (ran.code, [each["outcome"] for each in ran.objects]) == (3, ["cancelled", "not_found", "cancelled"])
    assert ids(cli("list", "--json")) == ["c"]
    assert [cli(*verb, "a").code for verb in (["get"], ["fire"], ["reschedule", "--delay", "1s"])] == [3, 3, 3]


def test_of_several_ids_one_that_is_wrong_does_not_stop_the_others(cli: Cli) -> None:
    add(cli, "a", "b")
    ran = cli("cancel", "a", "x" * 256, "b", "--yes", "--json")
    assert (ran.code, ran.error["error"], len(ran.objects)) == (2, "MessageIdError", 2)
    assert ids(cli("list", "--json")) == []


def test_what_is_in_flight_is_said_with_an_exit_code(cli: Cli) -> None:
    add(cli, "a", delay="0s", to="handler:slow")
    answers: dict[str, Ran] = {}

    async def play() -> None:
        scheduler = Scheduler(cli.url, namespace=cli.namespace)

        async def work(event: bytes) -> None:
            for verb in (["fire", "a"], ["reschedule", "a", "--delay", "1h"], ["cancel", "a", "--yes"]):
                answers[verb[0]] = await asyncio.to_thread(cli, *verb, "--json")

        scheduler.add_handler(work, name="slow")
        async with scheduler:
            async with asyncio.timeout(60):
                await scheduler.run_until_idle()

    asyncio.run(play())
    outcomes = {verb: (ran.code, ran.object["outcome"]) for verb, ran in answers.items()}
    assert outcomes == {"fire": (4, "in_flight"), "reschedule": (4, "too_late"), "cancel": (4, "in_flight")}


def test_pause_and_resume(cli: Cli) -> None:
    add(cli, "a", delay="0s")
    assert cli("pause").out == "none\n"
    assert [cli("pause", "mail").out for _ in range(2)] == ["mail paused\n", "mail was paused already\n"]
    assert cli("pause", "--json").object == {"paused": "mail"}
    assert cli("get", "a", "--json").object["state"] == "held"
    assert cli("resume", "handler:mail", "--json").object == {"what": "handler:mail", "paused": False, "changed": True}
    assert cli("resume", "mail").out == "mail was not paused\n"
    assert cli("get", "a", "--json").object["state"] == "overdue"


# --- dead letters -----------------------------------------------------------------------------------------


def test_dead_letters_are_listed_redriven_and_purged(cli: Cli) -> None:
    give_up(cli, "a", "b", "c")
    shapes = cli("dead", "list", "--json").objects
    assert {(each["id"], each["reason"], each["payload"]) for each in shapes} == {
        (name, "rejected", f"p {name}") for name in "abc"
    }
    assert ids(cli("dead", "list", "--json", "--reason", "late")) == []
    assert ids(cli("dead", "list", "--json", "--error", "KeyError")) == []
    assert sorted(ids(cli("dead", "list", "--json", "--error", "none"))) == ["a", "b", "c"]
    assert ids(cli("dead", "list", "--json", "--before", "2020-01-01T00:00:00Z")) == []
    assert len(cli("dead", "list", "--of", "bad", "--limit", "2").lines) == 3
    add(cli, "b", to="handler:bad")
    ran = cli("dead", "redrive", "a", "b", "--yes", "--json")
    assert ran.code == 4
    assert {each["id"]: each["outcome"] for each in ran.objects} == {"a": "redriven", "b": "exists"}
    assert cli("get", "a", "--json").object["attempt"] == 0
    assert cli("dead", "purge", "c", "--yes", "--json").object == {"purged": 1}
    assert cli("dead", "purge", "c", "--yes").code == 3
    assert cli("dead", "redrive", "--all", "--yes").out == "0 redriven, 1 not\nb: exists\n"
    assert cli("dead", "purge", "--all", "--yes").out == "1 deleted\n"


def test_a_dead_letter_is_shown_with_its_errors_and_its_traceback(cli: Cli) -> None:
    add(cli, "a", delay="0s", to="handler:bad")

    async def play() -> None:
        errors = iter(["first", "second", "a line\nand \x1b[31m another"])
        scheduler = Scheduler(cli.url, namespace=cli.namespace, retry=Retry(attempts=3, first="0s", cap="0s", jitter=0))

        async def fail(event: bytes) -> None:
            raise KeyError(next(errors))

        scheduler.add_handler(fail, name="bad")
        async with scheduler, asyncio.timeout(60):
            await scheduler.run_until_idle()

    asyncio.run(play())
    assert ids(cli("dead", "list", "--json", "--error", "KeyError")) == ["a"]
    lines = cli("dead", "show", "a").lines
    assert lines[0].startswith("a to handler:bad, due ")
    assert lines[1].endswith("after 3 attempts: attempts exhausted")
    errors = ["KeyError: 'first'", "KeyError: 'second'", r"KeyError: 'a line\nand \x1b[31m another'"]
    assert lines[2:5] == [f"  error: {each}" for each in errors]
    assert lines[5] == "  Traceback (most recent call last):"
    assert lines[-1] == f"  {errors[-1]}"
    shape = cli("dead", "show", "a", "--json").object
    assert (shape["earlier_errors"], shape["last_error"]) == (errors[:2], errors[2])
    assert shape["traceback"].splitlines()[-1] == errors[2]
    assert cli("dead", "show", "b").code == 3


@pytest.mark.parametrize("verb", [["cancel", "a"], ["dead", "purge", "--all"], ["dead", "redrive", "--all"]])
def test_off_a_terminal_nothing_is_destroyed_without_yes(cli: Cli, verb: list[str]) -> None:
    add(cli, "a")
    give_up(cli, "b")
    ran = cli(*verb)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith("There is no terminal to ask on: give --yes\n")
    assert (ids(cli("list", "--json")), ids(cli("dead", "list", "--json"))) == (["a"], ["b"])
    assert cli("dead", "purge", "--yes").code == 2, "which ones must be said"


# --- bad input --------------------------------------------------------------------------------------------

BAD: list[tuple[list[str], int, str, str]] = [
    (["schedule", "handler:m", "x"], 2, "ScheduleTimeError", "at, delay, every"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--at", "2031-01-01T00:00:00Z"], 2, "ScheduleTimeError", "at, "),
    (["schedule", "handler:m", "x", "--at", "2031-01-01T00:00:00"], 2, "ScheduleTimeError", "with an offset"),
    (["schedule", "handler:m", "x", "--at", "noon"], 2, "ScheduleTimeError", "'noon'"),
    (["schedule", "handler:m", "x", "--delay=-1s"], 2, "ScheduleTimeError", "'-1s'"),
    (["schedule", "handler:m", "x", "--delay", "nan"], 2, "ScheduleTimeError", "'nan'"),
    (["schedule", "handler:m", "x", "--delay", "3651d"], 2, "ScheduleTimeError", "at most 3650d"),
    (["schedule", "handler:m", "x", "--every", "61 * * * *"], 2, "ScheduleTimeError", "every"),
    (["schedule", "handler:m", "x", "--every", "0 9 * * *", "--tz", "Mars"], 2, "ScheduleTimeError", "'Mars'"),
    (["schedule", "handler:m", PAYLOAD * 40_000, "--delay", "1s"], 2, "PayloadTooLargeError", "262144"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--id", ""], 2, "MessageIdError", "empty"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--id", "x" * 256], 2, "MessageIdError", "256 bytes"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--id", "a\nb"], 2, "MessageIdError", "control"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--id", "a~1893456000000"], 2, "MessageIdError", "occurrence"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--header", "a b=" + HEADER], 2, "HeaderError", "header name"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--header", "aiodelay-x=" + HEADER], 2, "HeaderError", "reserved"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--header", "a"], 2, "HeaderError", "NAME=VALUE"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--key", KEY * 2000], 2, "HeaderError", "26000 bytes"),
    (["schedule", "mail", "x", "--delay", "1s"], 2, "TargetError", "'<sink>:<address>'"),
    (["schedule", "handler:a\r\nb", "x", "--delay", "1s"], 2, "TargetError", "control"),
    (["schedule", "nowhere:x", "x", "--delay", "1s"], 1, "UnknownSinkError", "'nowhere'"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--newer=-1"], 1, "ConfigurationError", "conflict.version"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--drop-after", "x"], 1, "ConfigurationError", "late.after"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--sink", "nowhere:"], 1, "ConfigurationError", "nowhere"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--namespace", "a b"], 1, "ConfigurationError", "namespace"),
    (["schedule", "handler:m", "x", "--delay", "1s", "--store", "http://u:hunter2@h"], 1, "ConfigurationError", "***"),
    (
        ["schedule", "handler:m", "x", "--delay", "1s", "--store", "sqlite:///x?jornal=1"],
        1,
        "ConfigurationError",
        "jor",
    ),
    (["get", "x" * 256], 2, "MessageIdError", "256 bytes"),
    (["reschedule", "a"], 2, "ScheduleTimeError", "missing"),
    (["fire", ""], 2, "MessageIdError", "empty"),
    (["list", "--since", "2031-01-01T00:00:00"], 2, "ScheduleTimeError", "since"),
    (["list", "--of", "a b"], 1, "ConfigurationError", "of"),
    (["list", "--to", "x"], 2, "TargetError", "'<sink>:<address>'"),
    (["list", "--after", "x"], 1, "ConfigurationError", "cursor"),
    (["list", "--after", "WzkyMjMzNzIwMzY4NTQ3NzU4MDgsIngiXQ=="], 1, "ConfigurationError", "cursor"),
    (["pause", "a b"], 1, "ConfigurationError", "what"),
    (["pause", ":x"], 2, "TargetError", "what"),
    (["dead", "list", "--before", "x"], 2, "ScheduleTimeError", "before"),
    (["dead", "list", "--of", ""], 1, "ConfigurationError", "what"),
]


@pytest.mark.parametrize(("arguments", "code", "error", "part"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused_by_the_errors_of_the_python_api(
    tmp_path: Path, arguments: list[str], code: int, error: str, part: str
) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/delay.db", tmp_path)
    assert cli("schedule", "--lines").out == "0 stored, 0 refused\n"
    ran = cli(*arguments, "--json")
    assert (ran.code, ran.out, ran.error["error"]) == (code, "", error)
    assert part in ran.error["detail"]
    plain = cli(*arguments)
    assert (plain.code, plain.err) == (code, f"aiodelay: {ran.error['detail']}\n")
    assert not [secret for secret in SECRETS if secret in ran.err + plain.err]
    assert ids(cli("list", "--json")) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["schedule"], "no destination"),
        (["schedule", "handler:m"], "no payload"),
        (["schedule", "handler:m", "x", "--payload-file", "y"], "both given"),
        (["schedule", "handler:m", "--lines"], "--lines takes no destination"),
        (["schedule", "handler:m", "x", "--delay", "1s", "--conflict", "newest"], "newest"),
        (["schedule", "handler:m", "x", "--delay", "1s", "--conflict", "keep", "--newer", "1"], "both given"),
        (["schedule", "handler:m", "x", "--delay", "1s", "--tz", "UTC"], "--tz needs --every"),
        (["fire"], "no id"),
        (["list", "--limit", "0"], "--limit"),
        (["lst"], "list"),
    ],
)
def test_a_command_line_that_is_wrong_exits_with_2(tmp_path: Path, arguments: list[str], text: str) -> None:
    ran = Cli("memory://", tmp_path)(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert text in ran.err


def test_a_store_must_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = Cli("", tmp_path)("list")
    assert (ran.code, ran.err) == (2, "aiodelay: no store: give --store URL, or set AIODELAY_STORE\n")


def test_a_store_that_does_not_answer_exits_with_5(tmp_path: Path) -> None:
    ran = Cli("redis://user:hunter2@127.0.0.1:1", tmp_path)("list", "--json")
    assert (ran.code, ran.error["error"]) == (5, "StoreUnavailableError")
    assert "hunter2" not in ran.err


# --- where Kafka differs ----------------------------------------------------------------------------------


def test_on_kafka_only_the_owner_of_a_topic_looks_into_it(kafka: str, tmp_path: Path) -> None:
    settings: dict[str, str | float] = {
        "cleanup_policy": "compact",
        "min_compaction_lag_ms": 86_400_000,
        "delete_retention_ms": 604_800_000,
    }
    topic = asyncio.run(create_topic(kafka, new_name("cli"), 1, **settings))
    cli = Cli(f"kafka://{kafka}/{topic}", tmp_path)
    for name in ("a", "b"):
        assert cli("schedule", "kafka:orders", "x", "--delay", "1h", "--id", name).code == 0
    ran = cli("cancel", "a", "--yes", "--json")
    assert (ran.code, ran.object["outcome"]) == (0, "recorded")
    for verb in (["list"], ["get", "b"], ["why", "b"], ["fire", "b"], ["load"], ["top"], ["export"], ["dead", "list"]):
        ran = cli(*verb, "--json")
        assert (ran.code, ran.error["error"]) == (1, "UnsupportedByStoreError"), verb
    assert ids(cli("list", "--own", "--json")) == ["b"]
    assert cli("why", "b", "--own", "--json").object["cause"] == "not_due"
    assert cli("fire", "b", "--own").out == "fired b\n"
    notes = [each for each in cli("check", "--json").objects if each["level"] == "note"]
    assert "--own" in notes[0]["mend"]


# --- what others have written -----------------------------------------------------------------------------

EVIL = "\x1b[2J\x9b2J\x07\r\nforged\u202e\u2028"


def test_nothing_that_was_stored_moves_the_cursor_of_a_terminal_or_forges_a_line(tmp_path: Path) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/delay.db?journal=100", tmp_path)
    name = "a\u202eb"

    async def play() -> None:
        scheduler = Scheduler(cli.url, retry=Retry.intervals(["1h"]), drain="1s")

        async def reject(event: bytes) -> Reject:
            return Reject(EVIL)

        async def fail(event: bytes) -> None:
            raise ValueError(EVIL)

        scheduler.add_handler(reject, name="bad")
        scheduler.add_handler(fail, name="worse")
        async with scheduler:
            evil = EVIL.encode()
            await scheduler.schedule(evil, to="handler:bad", delay="0s", id=name)
            await scheduler.schedule(evil, to="handler:worse", delay="0s", id="c", headers={"x": evil}, key=evil)

            async def has_failed() -> bool:
                found = await scheduler.get("c")
                return found is not None and found.record.attempt == 1

            await until(has_failed, "c has failed once")

    asyncio.run(play())
    for command in (
        ("list",),
        ("get", "c"),
        ("why", name),
        ("why", "c"),
        ("dead", "list"),
        ("top",),
        ("check",),
        ("export",),
        ("get", name),
        ("fire", name, "c"),
        ("schedule", "handler:x", "y", "--delay", "1h", "--id", name),
        ("dead", "redrive", name, "--yes"),
        ("dead", "purge", name, "--yes"),
        ("cancel", name, "c", "--yes"),
    ):
        for ran in (cli(*command), cli(*command, "--json")):
            shown = (ran.out + ran.err).split("\n")
            assert all(line.isprintable() for line in shown), (command, shown)
            assert not [line for line in shown if line.startswith("forged")], (command, shown)
            if command == ("get", "c") and ran.out.startswith("{"):
                assert ran.object["payload"] == EVIL, "and programs read what was written"
