"""Every public error has a text with numbers and units, and can be pickled, copied and chained."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Sequence

import pytest

import aiodelay
from aiodelay import AiodelayError, PartlyScheduledError, Rejected, StoreError, errors
from aiodelay.errors import cut, kind_of, shortened
from tests.support.clear_errors import PAYLOAD

INPUT = ("delay", "'soon'", "a duration")
INPUT_TEXT = "delay is 'soon'; allowed: a duration"

RENDERED: dict[type[AiodelayError], tuple[tuple[object, ...], str]] = {
    AiodelayError: (("it broke",), "it broke"),
    StoreError: (("it broke",), "it broke"),
    **dict.fromkeys(
        (
            errors.InputError,
            errors.ScheduleTimeError,
            errors.PayloadTypeError,
            errors.PayloadTooLargeError,
            errors.CodecError,
            errors.MessageIdError,
            errors.HeaderError,
            errors.TargetError,
            errors.TargetNotAllowedError,
            errors.ConfigurationError,
            errors.UnknownSinkError,
            errors.UnsupportedByStoreError,
            errors.MissingExtraError,
            errors.HandlerSignatureError,
            errors.DuplicateHandlerError,
            errors.StoreMismatchError,
        ),
        (INPUT, INPUT_TEXT),
    ),
    errors.RecordFormatError: (("3 bytes",), "stored record cannot be read: 3 bytes"),
    errors.DuplicateIdError: (
        ("a",),
        (
            "message 'a' is already scheduled; to avoid this error, use the conflict rule replace (the new message "
            "stays) or keep (the stored one stays)"
        ),
    ),
    errors.ClosedError: (("scheduler", "closed"), "scheduler is closed; use it inside its 'async with' block"),
    errors.WrongLoopError: (
        ("scheduler", "event loop"),
        "scheduler was opened in another event loop; open a separate scheduler here",
    ),
    errors.BlockingCallError: (
        ("BlockingScheduler",),
        (
            "BlockingScheduler would stop the event loop that is running in this thread; use a Scheduler instead, "
            "or call it with asyncio.to_thread()"
        ),
    ),
    errors.HandlerTimeoutError: (("pay", 1500), "handler pay did not finish within 1500 ms"),
    errors.HandlerResultError: (
        ("pay", "str"),
        "handler pay returned str; allowed: None, Later(delay), Reject(reason)",
    ),
    errors.StoreUnavailableError: (
        ("memory://", "no answer", "a"),
        "memory:// is unavailable: no answer (message 'a' was not stored)",
    ),
    errors.StoreDamagedError: (
        ("redis://localhost", "key '{shop:00}:msg' holds no hash", "a"),
        "redis://localhost cannot be used: key '{shop:00}:msg' holds no hash (message 'a' was not stored)",
    ),
    errors.StoreTooNewError: (
        ("redis://localhost", "uses quotas, which aiodelay 1.0.0 does not know", "upgrade this process"),
        "redis://localhost uses quotas, which aiodelay 1.0.0 does not know; upgrade this process",
    ),
    errors.StoreFullError: (
        ("memory://", "no room", "a"),
        "memory:// is full: no room (message 'a' was not stored)",
    ),
    errors.StoreBusyError: (
        ("a", 10_000, 67_108_864),
        (
            "message 'a' was not sent: the store did not take it within 10000 ms "
            "(67108864 bytes of commands are waiting); raise store_timeout or schedule less at once"
        ),
    ),
    errors.OutcomeUnknownError: (
        ("a", "no answer"),
        "whether message 'a' was stored is unknown: no answer; to find out, read the message",
    ),
    errors.SinkUnavailableError: (("stdout", "BrokenPipeError"), "sink stdout is unavailable: BrokenPipeError"),
    PartlyScheduledError: (
        (7, [Rejected(n, errors.InputError(*INPUT, f"m{n}")) for n in range(5)]),
        (
            "7 messages stored, 5 refused: message 0: delay of message 'm0' is 'soon'; allowed: a duration; "
            "message 1: delay of message 'm1' is 'soon'; allowed: a duration; "
            "message 2: delay of message 'm2' is 'soon'; allowed: a duration; and 2 more"
        ),
    ),
}


NAMES = [error.__name__ for error in RENDERED]


def is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, AiodelayError)


def defined_in_errors() -> list[type[AiodelayError]]:
    return [value for value in vars(errors).values() if is_error(value)]


def test_every_error_is_rendered_here() -> None:
    public = {value for name in aiodelay.__all__ if is_error(value := getattr(aiodelay, name))}
    assert public == set(RENDERED)


def test_every_error_is_exported() -> None:
    names = {error.__name__ for error in defined_in_errors()}
    assert names <= set(errors.__all__)
    assert names <= set(aiodelay.__all__)
    assert all(name.endswith("Error") for name in names)


@pytest.mark.parametrize("error", RENDERED, ids=lambda error: error.__name__)
def test_docstring_says_when(error: type[AiodelayError]) -> None:
    summary = (inspect.getdoc(error) or "").split("\n\n")[0]
    assert "__doc__" in vars(error)
    assert summary.endswith(".")
    assert len(summary) > 20


@pytest.mark.parametrize(("error", "arguments", "text"), [(kind, *case) for kind, case in RENDERED.items()], ids=NAMES)
def test_rendered(error: type[AiodelayError], arguments: Sequence[object], text: str) -> None:
    made = error(*arguments)
    assert str(made) == text
    assert repr(made).startswith(f"{error.__name__}(")
    assert isinstance(made, AiodelayError)


@pytest.mark.parametrize(("error", "arguments"), [(kind, case[0]) for kind, case in RENDERED.items()], ids=NAMES)
@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_pickled(error: type[AiodelayError], arguments: Sequence[object], protocol: int) -> None:
    made = error(*arguments)
    made.add_note("seen")
    again = pickle.loads(pickle.dumps(made, protocol))
    assert_same(made, again)
    assert again.__notes__ == ["seen"]


@pytest.mark.parametrize(("error", "arguments"), [(kind, case[0]) for kind, case in RENDERED.items()], ids=NAMES)
def test_copied(error: type[AiodelayError], arguments: Sequence[object]) -> None:
    made = error(*arguments)
    assert_same(made, copy.copy(made))
    assert_same(made, copy.deepcopy(made))


def assert_same(one: AiodelayError, other: AiodelayError) -> None:
    assert type(one) is type(other)
    assert str(one) == str(other)
    fields = {name: value for name, value in vars(one).items() if name != "__notes__" and not name.startswith("_")}
    assert {name: str(vars(other)[name]) for name in fields} == {name: str(value) for name, value in fields.items()}


@pytest.mark.asyncio
async def test_copied_outcome_cannot_send_again() -> None:
    async def again() -> str:
        return "sent"

    error = errors.OutcomeUnknownError("a", "no answer", again)
    assert str(error).endswith("unknown: no answer; to find out safely, await error.retry() within 25 s of the call")
    assert await error.retry() == "sent"
    with pytest.raises(errors.OutcomeUnknownError, match="this error is a copy, and a copy cannot repeat the call"):
        await pickle.loads(pickle.dumps(error)).retry()


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.InputError, ValueError),
        (errors.PayloadTypeError, TypeError),
        (errors.ConfigurationError, ValueError),
        (errors.HandlerSignatureError, TypeError),
        (errors.MissingExtraError, ImportError),
        (errors.HandlerTimeoutError, TimeoutError),
        (errors.HandlerResultError, TypeError),
        (errors.RecordFormatError, ValueError),
    ],
)
def test_kinds_that_python_has_a_word_for(error: type[AiodelayError], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


# --- how values are shown ---------------------------------------------------------------------------------


class Untellable:
    def __repr__(self) -> str:
        raise RuntimeError(PAYLOAD)


class Loud(str):
    __slots__ = ()

    def __repr__(self) -> str:
        raise RuntimeError(PAYLOAD)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x", "'x'"),
        (None, "None"),
        (True, "True"),
        (1.5, "1.5"),
        (int, "<class 'int'>"),
        ([1, "x", None], "[1, 'x', None]"),
        ((), "()"),
        (b"secret", "6 bytes"),
        (bytearray(b"secret"), "6 bytes"),
        ({"a": PAYLOAD}, "a dict"),
        ([{"a": PAYLOAD}], "a list"),
        ([0] * 101, "a list"),
        (Untellable(), "an Untellable"),
        ([Untellable()], "a list"),
        (Loud("x"), "a Loud"),
        (10**5000, "an int"),
        ("\x00\n\u2028\u202e\ud800\U0001f469é", "'\\x00\\n\\u2028\\u202e\\ud800\U0001f469é'"),
        ("a" * 100, "'" + "a" * 28 + "…" + "a" * 28 + "'"),
        ("redis://u:hunter2@host", "'redis://u:***@host'"),
    ],
    ids=map(str, range(19)),
)
def test_shortened(value: object, text: str) -> None:
    assert shortened(value) == text


def test_cut_and_kind() -> None:
    assert cut("x" * 11, 10) == "xxxx…xxxx"
    assert cut("a\tb\u2029") == r"a\tb\u2029"
    assert [kind_of(value) for value in (1, "", None, Untellable(), int)] == [
        *("an int", "a str", "None", "an Untellable", "a type")
    ]


def test_a_failed_import_names_the_extra_unless_something_of_ours_is_missing() -> None:
    missing = errors.missing_extra(ModuleNotFoundError(name="redis.asyncio"), "aiodelay.redis", "redis")
    assert str(missing) == "aiodelay.redis is missing redis.asyncio; allowed: pip install 'aiodelay[redis]'"
    again = errors.missing_extra(missing, "store redis://host", "other")
    assert str(again) == "store redis://host is missing redis.asyncio; allowed: pip install 'aiodelay[redis]'"
    ours, unnamed = ModuleNotFoundError(name="aiodelay.nothing"), ImportError("circular")
    assert errors.missing_extra(ours, "aiodelay.redis", "redis") is ours
    assert errors.missing_extra(unnamed, "aiodelay.redis", "redis") is unnamed
