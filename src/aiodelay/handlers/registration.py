"""Registration of handlers and event types. The type of a handler's first parameter decides which events it gets."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from aiodelay.core.appending import SEPARATOR
from aiodelay.core.durations import Duration, parse_duration
from aiodelay.core.event_codecs import codec_named
from aiodelay.core.retry import Retry
from aiodelay.core.validation import check_count, check_type_name, listed
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Lane, LaneLimits, Limit
from aiodelay.errors import (
    ConfigurationError,
    DuplicateHandlerError,
    HandlerSignatureError,
    RecordFormatError,
    cut,
    kind_of,
    shortened,
)

from .context import Later, Reject, RunContext, is_context
from .dependencies import Dependencies, dependency_of
from .limits import KeyReader, checked_limits, declared_limits, key_reader
from .spec import Batching, HandlerSpec, OnFailure

if TYPE_CHECKING:
    from fast_depends.dependencies import Dependant

__all__ = [
    "MAX_CONCURRENCY",
    "Decoder",
    "EventTypes",
    "Handler",
    "Result",
    "check_concurrency",
    "event",
    "is_coroutine_function",
    "is_event_class",
    "is_plain_function",
    "kind_of_function",
    "spec_of",
    "taker_spec",
    "type_name",
    "type_names",
]

Result: TypeAlias = Later | Reject | None
"""The values that a handler may return. A handler of batches may return a list with one of them for each event."""
_Results: TypeAlias = Result | Sequence[Result]
Handler: TypeAlias = Callable[..., Awaitable[_Results]] | Callable[..., _Results]
"""A coroutine function or a plain function. Its first parameter is the event, or a list of events."""
Decoder: TypeAlias = Callable[[bytes, str], Any]
"""Makes an event from a payload and the name of its encoding."""
T = TypeVar("T")

MAX_CONCURRENCY = 10_000
DEFAULT_BATCH = 100
MAX_BATCH = MAX_CLAIM_MESSAGES
MAX_BATCH_WAIT_MS = 60_000


def event(
    name: str, *, aliases: tuple[str, ...] = (), limit: Limit | Sequence[Limit] = ()
) -> Callable[[type[T]], type[T]]:
    """Give an event class a stable name. Messages are stored under this name instead of the class name.

    Args:
        name: The name from now on; 1 to 128 characters without spaces or ':'.
        aliases: Former names. Messages that were scheduled under them reach the same handler.
        limit: Limits for the messages of this class, over all processes: at most one `Limit` with a key, and one
            without. Put the decorator above `@dataclass`. The processes that serve the handler store the limits when
            they open. Every process that schedules stores the key with each message.

    Raises:
        ConfigurationError: A name does not have this form, or appears twice; or a limit is wrong.
    """
    former = listed(aliases, "event aliases", "('payment.checked',)")
    names = (check_type_name(name, "event name"), *(check_type_name(alias, "event alias") for alias in former))
    if len(set(names)) < len(names):
        raise ConfigurationError(
            "event aliases", shortened(former), "names that differ from each other and from the event's name"
        )

    def name_it(class_: type[T]) -> type[T]:
        if not isinstance(class_, type):
            raise ConfigurationError("@event", f"given to {kind_of(class_)}", "a class")
        limits = checked_limits(limit, class_)
        class_.__aiodelay_type__ = names  # type: ignore[attr-defined]
        class_.__aiodelay_limits__ = limits  # type: ignore[attr-defined]
        return class_

    return name_it


def type_names(class_: type) -> tuple[str, ...]:
    """Return an event class's stable name and its aliases."""
    given = class_.__dict__.get("__aiodelay_type__")
    return given if given is not None else (class_.__name__,)


def type_name(class_: type) -> str:
    """Return the name under which events of this class are stored."""
    return type_names(class_)[0]


def is_event_class(class_: object) -> bool:
    """Return whether instances can be events: of a dataclass, `msgspec.Struct`, attrs class or pydantic model."""
    return isinstance(class_, type) and (
        dataclasses.is_dataclass(class_)
        or issubclass(class_, msgspec.Struct)
        or hasattr(class_, "model_validate")
        or hasattr(class_, "__attrs_attrs__")
    )


class EventTypes:
    """The event classes that a scheduler has used, by name. A second class with the same name is refused."""

    def __init__(self) -> None:
        self._by_name: dict[str, type] = {}
        self._names: dict[type, str] = {}
        self._key_readers: dict[type, KeyReader] = {}

    def name_of(self, class_: type) -> str:
        """Return the stable name of a class, and remember the class.

        Raises:
            DuplicateHandlerError: Another class has this name.
            ConfigurationError: The class has no `@event` name, and its own name has a forbidden form.
        """
        known = self._names.get(class_)
        if known is not None:
            return known
        names = type_names(class_)
        for name in names:
            other = self._by_name.get(check_type_name(name, "event type name"), class_)
            if other is not class_:
                raise DuplicateHandlerError(
                    "event type",
                    f"{name!r}, the name of both {_path(other)} and {_path(class_)}",
                    "one class per name; give one class another name with @event(...)",
                )
        self._by_name.update(dict.fromkeys(names, class_))
        self._names[class_] = names[0]
        self.read_keys(class_, declared_limits(class_))
        return names[0]

    def read_keys(self, class_: type, limits: LaneLimits) -> None:
        """Give each message of a class the key that these limits name."""
        reader = key_reader(limits, class_)
        if reader is not None:
            self._key_readers[class_] = reader

    def key_of(self, event: object, lane: Lane) -> bytes | None:
        """Return the key that the limits of this lane give an event; None if they give none."""
        class_ = type(event)
        reader = self._key_readers.get(class_)
        return None if reader is None or self._names[class_] != lane else reader(event)

    def class_named(self, name: str) -> type | None:
        """Return the class with this name or alias; None if the scheduler has not used such a class."""
        return self._by_name.get(name)

    def copy(self) -> EventTypes:
        """Return a copy with the same classes."""
        copied = EventTypes()
        copied._by_name, copied._names = dict(self._by_name), dict(self._names)
        copied._key_readers = dict(self._key_readers)
        return copied


def _path(class_: type) -> str:
    return f"{class_.__module__}.{class_.__qualname__}"


def spec_of(
    function: Handler,
    *,
    types: EventTypes,
    name: str | None,
    concurrency: int,
    timeout: Duration | None,
    retry: Retry,
    source: tuple[str, str] | None = None,
    limit: Limit | Sequence[Limit] = (),
    batch: int | None = None,
    batch_wait: Duration | None = None,
    on_failure: OnFailure | None = None,
    gathered: bool = False,
) -> HandlerSpec:
    """Inspect a function, and return the spec with which the engine runs it.

    Raises:
        HandlerSignatureError: The function cannot be called as a handler.
        ConfigurationError: An option is out of range.
    """
    parameters, hints = _signature(function)
    class_, is_list = _event_class(function, parameters, hints)
    is_batch = is_list and not gathered
    if gathered and not is_list:
        raise ConfigurationError(
            "gathered", "given to a handler of single events", "a handler whose event parameter is annotated list[...]"
        )
    wanted = _wanted(function, parameters)
    rest = [parameter for parameter in parameters[1:] if parameter.name not in wanted]
    context_name = _context_parameter(function, rest, hints)
    is_coroutine = is_coroutine_function(function)
    call = _caller(function, context_name, parameters, has_dependencies=bool(wanted))
    if wanted:
        event_type = list[class_] if is_list else class_  # type: ignore[valid-type]
        call = Dependencies(_named(function), wanted, event_type, is_coroutine=is_coroutine).around(call)
    if class_ is bytes and name is None:
        raise HandlerSignatureError(
            _named(function), "a handler of bytes without a name", "@scheduler.handler(name='...') for bytes"
        )
    if class_ is not bytes and name is not None:
        raise ConfigurationError(
            "handler name", shortened(name), f"none for typed events; name {class_.__name__} with @event(...)"
        )
    route = _route(class_ if name is None else name, types, _named(function))
    if gathered:
        route["decode"] = _gathered(route["decode"])
    return HandlerSpec(
        **route,
        call=call,
        is_coroutine=is_coroutine,
        concurrency=check_concurrency(concurrency),
        timeout_ms=None
        if timeout is None
        else parse_duration(timeout, field="handler timeout", error=ConfigurationError, least_ms=1),
        retry=retry,
        source=source,
        limits=_limits_of(class_, limit, types, source),
        place=_place_of(function),
        batch=_batching(batch, batch_wait, on_failure, is_batch=is_batch, is_gathered=gathered),
    )


def _batching(
    size: int | None, wait: Duration | None, on_failure: OnFailure | None, *, is_batch: bool, is_gathered: bool
) -> Batching | None:
    """Return how a handler gets batches; None for a handler of single messages.

    Raises:
        ConfigurationError: An option is wrong, or is given to a handler of single messages.
    """
    if not is_batch:
        for name, value in (("batch", size), ("batch_wait", wait), ("on_failure", on_failure)):
            if value is not None:
                got = f"{shortened(value)} for a handler {'with gathered=True' if is_gathered else 'of single events'}"
                allowed = "a handler whose event parameter is annotated list[...], without gathered=True"
                raise ConfigurationError(name, got, allowed)
        return None
    wait_ms = 0 if wait is None else parse_duration(wait, field="batch_wait", error=ConfigurationError)
    if wait_ms > MAX_BATCH_WAIT_MS:
        raise ConfigurationError("batch_wait", shortened(wait), f"at most {MAX_BATCH_WAIT_MS // 1000}s")
    if on_failure is not None and on_failure not in get_args(OnFailure):
        raise ConfigurationError("on_failure", shortened(on_failure), " or ".join(map(repr, get_args(OnFailure))))
    return Batching(
        size=DEFAULT_BATCH if size is None else check_count(size, "batch", 1, MAX_BATCH),
        wait_ms=wait_ms,
        on_failure="halve" if on_failure is None else on_failure,
    )


def _limits_of(
    class_: type, limit: Limit | Sequence[Limit], types: EventTypes, source: tuple[str, str] | None
) -> LaneLimits:
    """Return the limits of a handler: its own limits, or the limits of its event type."""
    declared = declared_limits(class_)
    limits = checked_limits(limit, class_)
    if limits and declared and limits != declared:
        raise ConfigurationError(
            "limit",
            f"given to the handler and to {class_.__name__}",
            "one of the two: @event(..., limit=...) or limit=",
        )
    limits = limits or declared
    if limits and source is not None:
        got = f"given to a handler with the source {':'.join(source)}"
        raise ConfigurationError("limit", got, "a handler without a source: limits hold for messages in the store")
    types.read_keys(class_, limits)
    return limits


def taker_spec(
    what: type | str, *, types: EventTypes, retry: Retry, source: tuple[str, str] | None = None
) -> HandlerSpec:
    """Return the spec for a program that takes a lane's messages without a handler.

    Args:
        what: An event class; or the name of a lane whose payloads are bytes.
        types: The event classes used so far.
        retry: The retry policy for messages that are settled with an exception.
        source: Name and address of a source that also gives messages; None = only the store.

    Raises:
        ConfigurationError: `what` is neither an event class nor a possible name.
        HandlerSignatureError: Events of this class cannot be decoded.
    """
    if not isinstance(what, str) and not is_event_class(what):
        raise ConfigurationError("messages", shortened(what), "an event class, or the name of a handler of bytes")
    return HandlerSpec(
        **_route(what, types, "messages"),
        call=_not_called,
        is_coroutine=True,
        concurrency=0,
        timeout_ms=None,
        retry=retry,
        source=source,
        place="scheduler.messages(...)",
    )


def _not_called(event: object, context: RunContext[Any]) -> None:
    """Do nothing. A spec needs a `call`, but a subscriber takes the messages of this spec, and nothing calls it."""


def _route(what: type | str, types: EventTypes, owner: str) -> dict[str, Any]:
    """Return those fields of a spec that depend on `what`: an event class, or a name under which bytes arrive."""
    if isinstance(what, str):
        return {"name": check_type_name(what, "handler name"), "aliases": (), "decode": _as_bytes, "types": None}
    types.name_of(what)
    name, *aliases = type_names(what)
    names = frozenset([name, *aliases])
    return {"name": name, "aliases": tuple(aliases), "decode": _typed(what, owner), "types": names}


def check_concurrency(concurrency: object) -> int:
    """Return a handler's concurrency after a check of its type and range.

    Raises:
        ConfigurationError: The concurrency is out of range.
    """
    return check_count(concurrency, "handler concurrency", 1, MAX_CONCURRENCY)


def _signature(function: Handler) -> tuple[list[inspect.Parameter], Mapping[str, Any]]:
    if not callable(function):
        raise HandlerSignatureError("handler", kind_of(function), "a function")
    try:
        return list(inspect.signature(function).parameters.values()), get_type_hints(_target(function))
    except Exception as error:  # noqa: BLE001 - annotations given as text are evaluated here
        raise HandlerSignatureError(
            _named(function),
            f"a function whose signature cannot be read ({_in_short(error)})",
            "annotations that resolve",
        ) from None


def _unwrapped(function: Any) -> Any:  # noqa: ANN401 - any callable
    """Return the function inside a `functools.partial`; return any other object unchanged."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _target(function: object) -> Any:  # noqa: ANN401 - any callable
    """Return the function that runs when an object is called: for an instance, its class's `__call__`."""
    held = _unwrapped(function)
    return held if inspect.isroutine(held) else getattr(held, "__call__", held)  # noqa: B004


def is_coroutine_function(function: object) -> bool:
    """Return whether a call gives a coroutine. Partials, and objects with a coroutine `__call__`, count too."""
    return inspect.iscoroutinefunction(_target(function))


def is_plain_function(value: object) -> bool:
    """Return whether a value can be called, and a call does not give a coroutine."""
    return callable(value) and not is_coroutine_function(value)


def kind_of_function(value: object) -> str:
    """Describe, for an error text, a value that is not a plain function."""
    return "a coroutine function, which nobody would await" if callable(value) else kind_of(value)


def _event_class(function: Handler, parameters: list[inspect.Parameter], hints: Mapping[str, Any]) -> tuple[type, bool]:
    """Return the class of a handler's events, and whether the handler takes a list of them."""
    expected = (
        "a first positional parameter annotated with a dataclass, msgspec.Struct, pydantic model, or bytes; "
        "or with a list of one of them"
    )
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    target = _target(function)
    if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
        raise HandlerSignatureError(_named(function), "a generator", "a coroutine function or a plain function")
    if not parameters or parameters[0].kind not in positional:
        raise HandlerSignatureError(_named(function), "a function without an event parameter", expected)
    hint = hints.get(parameters[0].name)
    is_batch = get_origin(hint) is list
    class_ = get_args(hint)[0] if is_batch else hint
    if class_ is bytes:
        return bytes, is_batch
    if not isinstance(class_, type) or not is_event_class(class_):
        of = f"is annotated {cut(repr(hint))}" if parameters[0].name in hints else "has no annotation"
        got = f"a function whose event parameter {parameters[0].name!r} {of}"
        raise HandlerSignatureError(_named(function), got, expected)
    return class_, is_batch


def _wanted(function: Handler, parameters: list[inspect.Parameter]) -> dict[str, Dependant]:
    """Return the dependencies of a handler, by parameter name."""
    hints = get_type_hints(_target(function), include_extras=True)
    found = {parameter.name: dependency_of(parameter, hints.get(parameter.name)) for parameter in parameters[1:]}
    return {name: dependency for name, dependency in found.items() if dependency is not None}


def _context_parameter(function: Handler, rest: list[inspect.Parameter], hints: Mapping[str, Any]) -> str | None:
    found = None
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in rest:
        if is_context(hints.get(parameter.name)) and found is None:
            found = parameter.name
        elif parameter.default is inspect.Parameter.empty and parameter.kind not in variadic:
            raise HandlerSignatureError(
                _named(function),
                f"a function with the parameter {parameter.name!r}, which nothing can fill",
                "the event, one parameter annotated Context, dependencies, and parameters with defaults",
            )
    return found


def _caller(
    function: Handler, context_name: str | None, parameters: list[inspect.Parameter], *, has_dependencies: bool
) -> Callable[..., Any]:
    """Return a function that calls the handler with the event, the context and the values of its dependencies."""
    if context_name is None:
        if not has_dependencies:
            return lambda event, context: function(event)
        return lambda event, context, **values: function(event, **values)
    if parameters[1].name == context_name and parameters[1].kind is not inspect.Parameter.KEYWORD_ONLY:
        return function
    return lambda event, context, **values: function(event, **{context_name: context}, **values)


def _typed(class_: type, owner: str) -> Callable[[bytes, str], Any]:
    try:
        decoders = {encoding: codec_named(encoding).decoder(class_) for encoding in ("json", "msgpack")}
    except Exception as error:  # noqa: BLE001 - annotations of the event's fields are evaluated here
        got = f"given the event type {class_.__qualname__}, which cannot be read back ({_in_short(error)})"
        raise HandlerSignatureError(owner, got, "fields of types that msgspec or pydantic knows") from None
    json = decoders["json"]

    def decode(payload: bytes, encoding: str) -> object:
        if encoding == "json" or not encoding:
            try:
                return json(payload)
            except Exception:
                _check_is_single(payload, json)
                raise
        decoder = decoders.get(encoding)
        if decoder is None:
            raise RecordFormatError(f"unknown encoding {shortened(encoding)}")
        return decoder(payload)

    return decode


def _check_is_single(payload: bytes, decode: Callable[[bytes], object]) -> None:
    """Refuse the items of an unreadable payload with a clear reason. Another payload passes."""
    first, separator, _ = payload.partition(SEPARATOR)
    if not separator:
        return
    try:
        decode(first)
    except Exception:  # noqa: BLE001 - a user's type may raise anything
        return
    items = payload.count(SEPARATOR) + 1
    raise RecordFormatError(f"it has {items} items (Conflict.append), which only a handler with gathered=True can take")


def _gathered(decode: Decoder) -> Decoder:
    """Return a decoder of all items that have gathered in a payload."""

    def decode_all(payload: bytes, encoding: str) -> list[Any]:
        items = [payload] if encoding == "msgpack" else payload.split(SEPARATOR)
        return [decode(item, encoding) for item in items]

    return decode_all


def _as_bytes(payload: bytes, encoding: str) -> bytes:
    return payload


def _in_short(error: Exception) -> str:
    return cut(f"{type(error).__name__}: {error}", 120)


def _place_of(function: object) -> str:
    """Return a handler's module, name and line: `shop.check_payment, line 12`."""
    target = inspect.unwrap(_target(function))
    name = f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}".strip(".")
    code = getattr(target, "__code__", None)
    return name if code is None else f"{name}, line {code.co_firstlineno}"


def _named(function: object) -> str:
    held = _unwrapped(function)
    return f"handler {getattr(held, '__qualname__', type(held).__qualname__)}"
