"""`Scheduler`, the object that users open. It checks arguments and connects the parts of aiodelay; it has no loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import replace
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from msgspec import structs

from .backends import registry
from .core.durations import Duration, parse_duration
from .core.event_codecs import codec_named
from .core.ids import new_op
from .core.recurrence import Cron, Every
from .core.retry import Retry
from .core.validation import (
    Targets,
    check_count,
    check_flag,
    check_id,
    check_namespace,
    check_type_name,
    due_of,
    listed,
    split_target,
)
from .core.values import (
    NO_HEADERS,
    Alarm,
    Cancel,
    CancelOutcome,
    Claim,
    Command,
    Conflict,
    DeadLetter,
    Fire,
    FireOutcome,
    Lane,
    Late,
    Message,
    Promise,
    Put,
    Reach,
    Record,
    Refused,
    Reschedule,
    RescheduleOutcome,
    Scheduled,
    Stored,
    WorkStatus,
)
from .core.wakeup import WakeUp
from .engine.control import Control
from .engine.delivery.message_stream import Messages
from .engine.lifecycle import Running
from .engine.loops import RuntimeOptions
from .engine.sending.command_sender import CommandSender, answer_of
from .engine.sending.composer import Composer, check_rule, names_of
from .engine.sending.schedule_many import schedule_in_chunks
from .errors import (
    AiodelayError,
    ClosedError,
    ConfigurationError,
    DuplicateHandlerError,
    InputError,
    StoreError,
    StoreUnavailableError,
    UnknownSinkError,
    UnsupportedByStoreError,
    cut,
    kind_of,
    shortened,
)
from .handlers.context import RunContext
from .handlers.middleware import Middleware, chained
from .handlers.received import HeldMessage
from .handlers.registration import (
    Decoder,
    EventTypes,
    Handler,
    check_concurrency,
    is_coroutine_function,
    is_event_class,
    spec_of,
    taker_spec,
    type_name,
)
from .handlers.spec import HandlerSpec
from .ports import Endpoints, Loads, Sink, Source, Store, Transfer
from .ports.clock import Clock, SystemClock
from .ports.reactive import Subscriber
from .telemetry import Telemetry

if TYPE_CHECKING:
    from .telemetry.commands import Carrier
    from .telemetry.observer import Observer

__all__ = ["Context", "Received", "Scheduler"]

log: logging.Logger = logging.getLogger("aiodelay")

F = TypeVar("F", bound=Handler)
T = TypeVar("T")
A = TypeVar("A")
S = TypeVar("S")


class Context(RunContext["Scheduler"]):
    """One attempt at delivering one message. A handler receives it as an argument."""

    __slots__ = ()


class Received(HeldMessage[T, Context]):
    """A message that a program took from `Scheduler.messages`. Until it is settled, the worker renews its lease.

    Used as a context manager, the message settles itself:

    - The block ends normally: the message is done.
    - The block raises: the retry policy decides about another attempt.
    - The block's task is cancelled: the message is given back.

    In the last two cases, the exception also leaves the block.

    Attributes:
        event: The event.
        context: The context of this attempt, as a handler receives it.
        result: The result that settled the message; None until then.
    """

    __slots__ = ()


H = TypeVar("H", bound=Middleware[Context, Any])
M = TypeVar("M", bound=Middleware[Message, Scheduled])
D = TypeVar("D", bound=Callable[[DeadLetter], Any])
SERIES_AGAIN_S = 1.0
MOST_PAYLOAD = 1_000_000_000


class Scheduler(Control):
    """Schedules messages, and dispatches them while its `async with` block lasts.

    A scheduler is not thread-safe: use it on the event loop that opened it. A closed scheduler may be opened again.

    Args:
        store: A URL (`sqlite:///delay.db`, `sqlite:////var/lib/delay.db`, `memory://`), or a `Store`.
        namespace: Separates the messages of several applications in one store; 1 to 64 characters of
            A-Z a-z 0-9 . _ -
        sinks: The sinks that `to=` may name: URLs (`stdout:`) or `Sink`s. Some stores bring sinks of their own, as
            `redis://` does. A sink given here replaces the store's sink of the same name.
        sources: The sources that a handler's `source=` may name: URLs (`redis-list://host`) or `Source`s. Some stores
            bring sources of their own. A source given here replaces the store's source of the same name.
        dispatch: False for a process that only schedules.
        lanes: The handlers (by type name) and sinks (by name) to serve; None = all.
        encoding: The encoding for typed events: `json` or `msgpack`. Every scheduler reads both encodings.
        retry: The retry policy of sinks, and of handlers without a retry policy of their own.
        check_events: Whether `schedule()` decodes each encoded event again, and refuses an event that its own type
            cannot read. This check runs the type's own code once more (`__post_init__`, validators).
        max_payload: Most bytes of an encoded event.
        allowed_targets: The destinations that `to=` may name; an entry that ends in `*` is a prefix. None = all.
        store_timeout: How long a command waits to be sent, and then for the answer, before it fails.
        open_timeout: How long opening tries again while the store, a sink or a source does not answer. The last attempt
            may take as long as the store's own timeouts. "0s" = one attempt. None = 30 s; with `dispatch=False`, one
            attempt.
        drain: How long closing waits for messages in flight. After that, closing cancels their runs and gives the
            messages back.
        overdue_alarm: The scheduler raises an alarm when a message has been overdue for this long.
        on_alarm: A plain function. The scheduler calls it with each `Alarm`, and again when the alarm is over. Alarms
            are logged in any case.
        telemetry: The settings for traces and metrics (docs/telemetry.md), which need an OpenTelemetry provider.
        clock: The clock of the scheduler and its store, for tests.

    Raises:
        ConfigurationError: A setting is wrong. The error names the setting, its value and the allowed values.
    """

    def __init__(
        self,
        store: str | Store,
        *,
        namespace: str = "default",
        sinks: Collection[Sink | str] = (),
        sources: Collection[Source | str] = (),
        dispatch: bool = True,
        lanes: Collection[str] | None = None,
        encoding: Literal["json", "msgpack"] = "json",
        retry: Retry | None = None,
        check_events: bool = True,
        max_payload: int = 262_144,
        allowed_targets: Collection[str] | None = None,
        store_timeout: Duration = "10s",
        open_timeout: Duration | None = None,
        drain: Duration = "30s",
        overdue_alarm: Duration = "60s",
        on_alarm: Callable[[Alarm], object] | None = None,
        telemetry: Telemetry | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.namespace: str = check_namespace(namespace)
        self._store = registry.open_store(store, namespace=self.namespace, clock=clock)
        self._sinks = _all_sinks(
            self._store, [registry.open_sink(sink) for sink in listed(sinks, "sinks", "['stdout:']")]
        )
        self._sources, self._reads_sources = _all_sources(self._store, sources), True
        self._dispatch = check_flag(dispatch, "dispatch")
        self._lanes = None if lanes is None else _checked_lanes(lanes)
        self._retry = Retry() if retry is None else _checked(retry, Retry, "retry")
        self._telemetry = Telemetry() if telemetry is None else _checked(telemetry, Telemetry, "telemetry")
        if open_timeout is None:  # in a process that only schedules, a caller waits for the error: fail at once
            open_timeout = "30s" if self._dispatch else "0s"
        if on_alarm is not None and not _is_plain_function(on_alarm):
            raise ConfigurationError("on_alarm", _kind_of_function(on_alarm), "a plain function that takes an Alarm")
        if clock is not None and not hasattr(clock, "now_ms"):
            raise ConfigurationError("clock", kind_of(clock), "a Clock")
        self._handle_middleware: list[Middleware[Context, Any]] = []
        self._schedule_middleware: list[Middleware[Message, Scheduled]] = []
        self._dead_letter_hooks: list[Callable[[DeadLetter], Awaitable[object]]] = []
        self._options = RuntimeOptions(
            clock or SystemClock(),
            parse_duration(store_timeout, field="store_timeout", error=ConfigurationError, least_ms=1),
            parse_duration(open_timeout, field="open_timeout", error=ConfigurationError),
            parse_duration(drain, field="drain", error=ConfigurationError),
            parse_duration(overdue_alarm, field="overdue_alarm", error=ConfigurationError, least_ms=1),
            self._retry,
            on_alarm,
            self._handle_middleware,
            dead_letter_hooks=self._dead_letter_hooks,
        )
        if encoding not in ("json", "msgpack"):
            raise ConfigurationError("encoding", shortened(encoding), "'json' or 'msgpack'")
        self.targets: Targets = Targets(allowed_targets)
        self._types = EventTypes()
        self._composer = Composer(
            codec=codec_named(encoding),
            sinks=self._sinks,
            targets=self.targets,
            max_payload=check_count(max_payload, "max_payload", 1, MOST_PAYLOAD),
            traits=lambda: self._store.traits,
            types=self._types,
            checks_events=check_flag(check_events, "check_events"),
        )
        self._handlers: dict[Lane, HandlerSpec] = {}
        self._subscribed: list[HandlerSpec] = []
        self._series: dict[Lane, Message] = {}
        self._running: Running | None = None
        self._opening: Running | None = None
        self._commands: Carrier | None = None
        self._was_closed = False
        self._closing = asyncio.Lock()
        # Import here, not at the top of the module: so `import aiodelay` stays fast. A later import could fail, because
        # the process may have no free file handles by then.
        from .telemetry.observer import observer_of  # noqa: PLC0415

        self._observer_of = observer_of

    @property
    def store(self) -> Store:
        """The store, whether the scheduler is open or not.

        Use it for operations that the scheduler does not offer, such as `scheduler.store.now_ms()`. The scheduler opens
        and closes its store. While the store is closed, an operation that needs its connection raises `ClosedError`.
        """
        return self._store

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """The sinks by name, including the sinks of the store, whether the scheduler is open or not."""
        return self._sinks

    def sink(self, name: str) -> Sink:
        """Return the sink with this name.

        Args:
            name: The part of `to=` before the colon.

        Raises:
            UnknownSinkError: The scheduler has no sink of that name.
        """
        if name not in self._sinks:
            known = ", ".join(sorted(self._sinks)) or "none (the scheduler has no sink)"
            raise UnknownSinkError("sink", shortened(name), known)
        return self._sinks[name]

    def decoders(self) -> Mapping[Lane, Decoder]:
        """Return the payload decoders by the name of the event type. Former names of event types are included."""
        return {name: spec.decode for spec in self._handlers.values() for name in (spec.name, *spec.aliases)}

    def opened_store(self) -> Store:
        """Return the store of an open scheduler.

        Raises:
            ClosedError: The scheduler is not open.
            WrongLoopError: The scheduler was opened on another event loop, or in another process.
        """
        self._ready()
        return self._store

    def __repr__(self) -> str:
        return f"<Scheduler {self._store.name} {'open' if self._running else 'closed'}>"

    # --- schedule -----------------------------------------------------------------------------------------

    async def schedule(
        self,
        event: object,
        /,
        *,
        at: datetime | None = None,
        delay: Duration | None = None,
        every: Every | Cron | None = None,
        id: str | None = None,  # noqa: A002 - the word users look for
        to: str | None = None,
        key: bytes | None = None,
        headers: Mapping[str, bytes] = NO_HEADERS,
        conflict: Conflict = Conflict.replace(),  # noqa: B008 - immutable
        late: Late = Late.deliver(),  # noqa: B008 - immutable
    ) -> Scheduled:
        """Store a message until it is due. Once this call has returned, the message is not lost (S2).

        Concurrent calls share a round trip. If a call is cancelled before its batch is sent, the message is not stored.
        If the call is cancelled later, the message may be stored.

        Args:
            event: A dataclass, `msgspec.Struct`, attrs or pydantic instance; or bytes, with `to=`. None, with `to=` and
                `key`, is a record without a value, such as a tombstone in Kafka.
            at: The due time: an aware datetime. A message with a past time is due now.
            delay: The due time as a duration from now, on the store's clock: a `timedelta`, or text such as "1h30m".
            every: A rule by which the message recurs.
            id: An id of your choice, with which to cancel or replace the message; up to 255 bytes of UTF-8. None = the
                scheduler makes an id.
            to: The destination, `<sink>:<address>`. None = the message goes to the handler of the event's type.
            key: The key of the message, for sinks that have keys.
            headers: Headers that are delivered with the message, byte for byte; up to 64, 16 KiB together.
            conflict: The rule for an id that is already scheduled.
            late: The policy for a message that would be delivered much too late.

        Returns:
            The id, the due time, and whether the message was stored, replaced an earlier message, or left an earlier
            message unchanged.

        Raises:
            InputError: An argument is wrong; nothing was sent.
            DuplicateIdError: The id is already scheduled, and `conflict` is `Conflict.error()`.
            StoreUnavailableError, StoreFullError, StoreBusyError: The message is certainly not stored.
            OutcomeUnknownError: The message may be stored. `await error.retry()` finds out safely whether it is.
        """
        message = Message(event, at, delay, every, id, to, key, headers, conflict, late)
        if self._schedule_middleware:
            return await chained(self._schedule_middleware, self._schedule)(message)
        return await self._schedule(message)

    async def _schedule(self, message: Message) -> Scheduled:
        commands = self._open_commands()
        put = self._compose(message)
        return answer_of(put, await commands.carry_out(put, put.envelope.size))

    async def schedule_many(
        self,
        messages: Iterable[Message] | AsyncIterable[Message],
        *,
        progress: Callable[[int], object] | None = None,
        answered: Callable[[int, Scheduled | AiodelayError], object] | None = None,
    ) -> int:
        """Store many messages, 500 in each round trip. The call reads messages only as fast as the store takes them.

        Args:
            messages: `Message(event, delay=..., ...)`; a plain or an asynchronous iterable, of any length.
            progress: A plain function. It is called after each round trip, with the number of messages stored so far.
            answered: A plain function. It is called once for each message, in no particular order, with the message's
                position (from 0) and its `Scheduled` or error. With `answered`, this method neither raises nor
                collects the errors of refused messages.

        Returns:
            The number of messages that the store accepted. A message also counts if its `conflict` rule kept the
            earlier message, or found this message outdated.

        Raises:
            PartlyScheduledError: The store refused some messages and stored all others. The error names each refused
                message with its position and error.
        """
        commands = self._open_commands()
        if not isinstance(messages, Iterable | AsyncIterable):
            raise InputError("messages", kind_of(messages), "an iterable or asynchronous iterable of Message")
        if progress is not None and not _is_plain_function(progress):
            raise InputError("progress", _kind_of_function(progress), "a plain function that takes a number")
        if answered is not None and not _is_plain_function(answered):
            allowed = "a plain function that takes a position and an answer"
            raise InputError("answered", _kind_of_function(answered), allowed)
        if self._schedule_middleware:
            return await schedule_in_chunks(messages, _sized, self._schedule_each, progress, answered)
        if answered is None:
            return await schedule_in_chunks(messages, self._compose_sized, commands.carry_out_many, progress)

        async def carry_out(puts: Sequence[Put], size: int) -> Sequence[Scheduled | AiodelayError]:
            outcomes = await commands.carry_out_many(puts, size)
            return [
                outcome if isinstance(outcome, AiodelayError) else answer_of(put, outcome)
                for put, outcome in zip(puts, outcomes, strict=True)
            ]

        return await schedule_in_chunks(messages, self._compose_sized, carry_out, progress, answered)

    async def _schedule_each(self, messages: Sequence[Message], size: int) -> Sequence[object]:
        """Schedule messages concurrently, each through the middleware. The messages share round trips."""
        schedule = chained(self._schedule_middleware, self._schedule)
        return await asyncio.gather(*map(schedule, messages), return_exceptions=True)

    def _compose_sized(self, message: Message) -> tuple[Put, int]:
        put = self._compose(message)
        return put, put.envelope.size

    def _compose(self, message: Message) -> Put:
        return self._composer.put(_checked(message, Message, "message"), self._store.now_ms())

    async def cancel(self, message_id: str, *, if_revision: int | None = None) -> CancelOutcome:
        """End a message. If the message is a series, the retries of its occurrences end too.

        Args:
            message_id: The id of the message.
            if_revision: End the message only if it still has this revision.

        Returns:
            `CANCELLED`: the message will not be delivered.
            `IN_FLIGHT`: the attempt under way goes on; no retry and no recurrence follows.
            `NOT_FOUND`: no message with this id is scheduled.
            `RECORDED` (Kafka, in a process that does not own all partitions): the message will not be delivered,
            unless its delivery has begun.
            `OUTDATED`: the message has another revision than `if_revision`, and stays.

        Raises:
            ConfigurationError: `if_revision` is not a revision.
            UnsupportedByStoreError: On Kafka, `if_revision` needs a process that owns all partitions.
            StoreUnavailableError, StoreBusyError, OutcomeUnknownError: As in `schedule`.
        """
        if if_revision is not None:
            self._composer.check_mode(Conflict.if_revision(if_revision).mode)
        command = Cancel(new_op(), check_id(message_id), None if if_revision is None else (if_revision, None))
        return answer_of(command, await self._open_commands().carry_out(command, 0))

    async def reschedule(
        self, message_id: str, *, at: datetime | None = None, delay: Duration | None = None
    ) -> RescheduleOutcome:
        """Move a pending message to another due time, and change nothing else.

        Returns:
            `RESCHEDULED`: the message has the new due time.
            `NOT_FOUND`: no message with this id is pending.
            `TOO_LATE`: the delivery at the old due time has begun. No delivery at the new due time follows.

        Raises:
            ScheduleTimeError: As in `schedule`.
            UnsupportedByStoreError: On Kafka, only a process that owns all partitions can reschedule.
            StoreUnavailableError, StoreBusyError, OutcomeUnknownError: As in `schedule`.
        """
        self._check_changes("reschedule")
        command = Reschedule(new_op(), check_id(message_id), due_of(at, delay, self._store.now_ms()))
        return answer_of(command, await self._open_commands().carry_out(command, 0))

    async def fire(self, message_id: str) -> FireOutcome:
        """Make a pending message due now.

        Returns:
            `FIRED`: the message is due now.
            `NOT_FOUND`: no message with this id is pending.
            `IN_FLIGHT`: the delivery of the message has already begun.

        Raises:
            UnsupportedByStoreError: On Kafka, only a process that owns all partitions can fire messages.
            StoreUnavailableError, StoreBusyError, OutcomeUnknownError: As in `schedule`.
        """
        self._check_changes("fire")
        command = Fire(new_op(), check_id(message_id))
        return answer_of(command, await self._open_commands().carry_out(command, 0))

    async def carry_out(self, commands: Sequence[Command]) -> Sequence[Stored | Refused | AiodelayError]:
        """Send commands unchanged, in one batch. Use it for commands that no other method can express.

        Returns:
            An answer or an error for each command, in order.

        Raises:
            ClosedError: The scheduler is not open.
        """
        size = sum(command.envelope.size for command in commands if isinstance(command, Put))
        return await self._open_commands().carry_out_many(commands, size)

    def _check_changes(self, what: str) -> None:
        self._ready()
        if self._store.traits.changes:
            return
        if self.status().phase == "loading":
            raise StoreUnavailableError(self._store.name, "it is being opened")
        raise UnsupportedByStoreError("command", what, "schedule, cancel; or a process that owns all partitions")

    # --- middleware -----------------------------------------------------------------------------------------

    @overload
    def middleware(self, around: Literal["handle"], /) -> Callable[[H], H]: ...

    @overload
    def middleware(self, around: Literal["schedule"], /) -> Callable[[M], M]: ...

    def middleware(self, around: Literal["handle", "schedule"], /) -> Callable[[Any], Any]:
        """Run a coroutine function around each run of a handler, or around each scheduled message.

        The function has the form `async def middleware(context, call_next)`. It returns the result of
        `await call_next(context)`, or raises. The first middleware added is the outermost. If the middleware sets
        context variables before `call_next`, the handler sees them, also in a worker thread.

        Args:
            around: With `handle`, the middleware surrounds each run of a handler, and gets the run's `Context`. An
                exception of the middleware counts as an exception of the handler. With `schedule`, the middleware
                surrounds each message of `schedule` and `schedule_many`, and gets the `Message`. It may pass another
                `Message` to `call_next`.

        Raises:
            ClosedError: The scheduler is already open.
            ConfigurationError: `around` is another value, or the function is not a coroutine function.
        """
        if around not in ("handle", "schedule"):
            raise ConfigurationError("middleware", shortened(around), "'handle' or 'schedule'")
        if self._running is not None:
            raise ClosedError("scheduler", "open already", "add middleware before it is opened")

        def add(function: Any) -> Any:  # noqa: ANN401 - one of two kinds
            if not is_coroutine_function(function):
                raise ConfigurationError("middleware", kind_of(function), "async def middleware(context, call_next)")
            (self._handle_middleware if around == "handle" else self._schedule_middleware).append(function)
            return function

        return add

    def on_dead_letter(self, hook: D, /) -> D:
        """Decorate a function that is called with each `DeadLetter` that this process makes.

        Calls happen one at a time, each after the dead letter was stored. An exception of the function is logged. A
        coroutine function runs on the event loop, a plain function in a worker thread. If several functions are
        decorated, each of them is called. Closing waits for the last calls until `drain` is over, and up to 3 s more.

        The function is not called for:

        - messages that other processes give up;
        - messages that a store gives up by itself (`killed_worker`, and most of `late`);
        - messages that this process gave up just before it was killed.

        `dead_letters()` lists all dead letters.

        Raises:
            ClosedError: The scheduler is already open.
            ConfigurationError: The hook is not a function.
        """
        if not callable(hook):
            raise ConfigurationError("on_dead_letter", kind_of(hook), "a function that takes a DeadLetter")
        if self._running is not None:
            raise ClosedError("scheduler", "open already", "add the function before it is opened")
        called: Callable[..., Any] = hook
        self._dead_letter_hooks.append(
            called if is_coroutine_function(hook) else lambda letter: asyncio.to_thread(called, letter)
        )
        return hook

    # --- handlers -----------------------------------------------------------------------------------------

    @overload
    def handler(self, function: F, /) -> F: ...

    @overload
    def handler(
        self,
        function: None = None,
        /,
        *,
        name: str | None = None,
        concurrency: int = 16,
        timeout: Duration | None = None,
        retry: Retry | None = None,
        every: Every | Cron | None = None,
        source: str | None = None,
    ) -> Callable[[F], F]: ...

    def handler(
        self,
        function: F | None = None,
        /,
        *,
        name: str | None = None,
        concurrency: int = 16,
        timeout: Duration | None = None,
        retry: Retry | None = None,
        every: Every | Cron | None = None,
        source: str | None = None,
    ) -> F | Callable[[F], F]:
        """Decorate a handler. The type of its first parameter is the event type that it handles.

        A coroutine function runs on the event loop, a plain function in a worker thread. A handler returns None,
        `Later(delay)` or `Reject(reason)`. An exception leads to a retry. After the first parameter, one parameter may
        be annotated `Context`. All other parameters need defaults or dependencies (`Depends`). Methods,
        `functools.partial`s and callable objects can be handlers too.

        The decorated function can still be called directly.

        Args:
            function: The handler, if the decorator is used without parentheses.
            name: Only for handlers of bytes: the name that messages use, as `to="handler:<name>"`.
            concurrency: Most runs at once in this process.
            timeout: The longest time for one run. If a coroutine exceeds this time, it is cancelled, which counts as a
                failed attempt.
            retry: The retry policy; None = the scheduler's retry policy.
            every: A rule by which an event recurs while any process serves this handler. The scheduler makes the event
                by calling the event type without arguments.
            source: `<source>:<address>`, such as `redis-list:orders`. The handler then takes messages from this address
                too, beside the messages that are scheduled for it. Retries and dead letters go to this scheduler's
                store.

        Raises:
            HandlerSignatureError: The function cannot be a handler. The error says why, and names the expected form.
            DuplicateHandlerError: Another handler has this type name, or this source.
            ConfigurationError: An option is wrong.
        """

        def decorate(function: F) -> F:
            self.add_handler(
                function,
                name=name,
                concurrency=concurrency,
                timeout=timeout,
                retry=retry,
                every=every,
                source=source,
            )
            return function

        return decorate if function is None else decorate(function)

    def add_handler(
        self,
        function: Handler,
        *,
        name: str | None = None,
        concurrency: int = 16,
        timeout: Duration | None = None,
        retry: Retry | None = None,
        every: Every | Cron | None = None,
        source: str | None = None,
    ) -> None:
        """Add a handler, also while the scheduler is open. Arguments and errors are those of `handler`."""
        retry = self._retry if retry is None else _checked(retry, Retry, "retry")
        spec = spec_of(
            function,
            types=self._types,
            name=name,
            concurrency=concurrency,
            timeout=timeout,
            retry=retry,
            source=None if source is None else self._checked_source(source),
        )
        self._check_free(spec)
        if spec.name in self._sinks:
            raise DuplicateHandlerError("handler", f"named {spec.name!r}, like a sink", "a name that no sink has")
        if every is not None:
            self._series[spec.name] = self._handler_series(spec, every)
        self._handlers[spec.name] = spec
        if self._running is not None and self._serves(spec):
            self._running.subscriptions.add_handler(spec)
            if every is not None:
                self._running.spawn(
                    self._schedule_series_soon(spec.name, self._running), f"aiodelay series {spec.name}"
                )

    def _check_free(self, spec: HandlerSpec) -> None:
        """Refuse a second handler or subscription for the same messages in this process."""
        for other in (*self._handlers.values(), *self._subscribed):
            shared = {other.name, *other.aliases} & {spec.name, *spec.aliases}
            if shared:
                raise DuplicateHandlerError(
                    "handler",
                    f"a second handler for {min(shared)!r}; the first is {other.place}",
                    "one handler per event type",
                )
            if spec.source is not None and spec.source == other.source:
                got = f"{':'.join(spec.source)!r}, which another handler already has: {other.place}"
                raise DuplicateHandlerError("source", got, "one handler per source")

    def _checked_source(self, source: str) -> tuple[str, str]:
        name, address = split_target(source, field="source")
        if name not in self._sources:
            known = ", ".join(f"{each}:" for each in sorted(self._sources)) or "none"
            allowed = f"{known} (add other sources with the setting sources)"
            raise ConfigurationError("source", shortened(source), allowed)
        self._sources[name].check(address)
        return name, address

    def _handler_series(self, spec: HandlerSpec, every: Every | Cron) -> Message:
        check_rule(every)
        class_ = self._types.class_named(spec.name)
        allowed = "handlers of event types that can be made without arguments"
        if class_ is None:
            raise ConfigurationError("every", "given to a handler of bytes", allowed)
        try:
            event = class_()
        except Exception as error:  # noqa: BLE001 - a user's type may raise anything
            got = f"given to the handler of {spec.name}, which raises {type(error).__name__} ({cut(str(error))})"
            raise ConfigurationError("every", got, allowed) from None
        return Message(event, every=every, id=f"handler:{spec.name}", conflict=Conflict.keep())

    async def remove_handler(self, what: type | str) -> None:
        """Stop serving a handler. Return when the handler's messages in flight have settled.

        Runs that go on after `drain` are cancelled. Runs that still do not end are abandoned, as in closing
        (docs/guarantees.md).

        Args:
            what: The event class, or the handler's name.

        Raises:
            ConfigurationError: The scheduler has no such handler.
        """
        name = self._handler_name(what)
        del self._handlers[name]
        self._series.pop(name, None)
        if self._running is not None:
            await self._running.subscriptions.remove(name)

    def set_concurrency(self, what: type | str, concurrency: int) -> None:
        """Change how many runs of a handler may happen at once, also while the scheduler is open.

        Args:
            what: The event class, or the handler's name.
            concurrency: Most runs at once, 1 to 10,000. Runs under way go on.

        Raises:
            ConfigurationError: The scheduler has no such handler, or the number is out of range.
        """
        name = self._handler_name(what)
        self._handlers[name] = replace(self._handlers[name], concurrency=check_concurrency(concurrency))
        if self._running is not None:
            self._running.subscriptions.set_concurrency(name, concurrency)

    def _handler_name(self, what: type | str) -> Lane:
        name = type_name(what) if isinstance(what, type) and is_event_class(what) else what
        if not isinstance(name, str) or name not in self._handlers:
            raise ConfigurationError(
                "handler", shortened(what), ", ".join(sorted(self._handlers)) or "none (no handler was added)"
            )
        return name

    def _serves(self, spec: HandlerSpec) -> bool:
        return self._lanes is None or spec.name in self._lanes

    # --- messages without a handler -------------------------------------------------------------------------

    @overload
    def messages(
        self, what: type[T], /, *, concurrency: int = 16, retry: Retry | None = None, source: str | None = None
    ) -> Messages[Received[T]]: ...

    @overload
    def messages(
        self, what: str, /, *, concurrency: int = 16, retry: Retry | None = None, source: str | None = None
    ) -> Messages[Received[bytes]]: ...

    def messages(
        self, what: type | str, /, *, concurrency: int = 16, retry: Retry | None = None, source: str | None = None
    ) -> Messages[Received[Any]]:
        """Return a publisher of the messages of one event type, for a program that takes messages without a handler.

        `async for message in scheduler.messages(CheckPayment)` pulls messages. `messages.subscribe(subscriber)` gives a
        `Subscriber` as many messages as it requests. The program that took a message settles it. The scheduler serves
        this event type even if the setting `lanes` does not name it.

        Args:
            what: The event class; or a name, for the bytes that are scheduled to `handler:<name>`.
            concurrency: Most messages in flight of an `async for`. A `Subscriber` requests as many as it wants.
            retry: The retry policy for messages that are settled with an exception; None = the scheduler's retry
                policy.
            source: `<source>:<address>`. The publisher then gives the messages from this address too (see `handler`).

        Raises:
            ConfigurationError: An argument is wrong.
        """
        spec = taker_spec(
            what,
            types=self._types,
            retry=self._retry if retry is None else _checked(retry, Retry, "retry"),
            source=None if source is None else self._checked_source(source),
        )
        return Messages(lambda subscriber: self._publish(spec, subscriber), check_concurrency(concurrency))

    def _publish(self, spec: HandlerSpec, subscriber: Subscriber[Received[Any]]) -> None:
        running = self._ready()
        if running.is_closing:
            raise ClosedError("scheduler", "closed")
        if not running.dispatches:
            raise ConfigurationError("messages", "called on a scheduler that does not dispatch", "dispatch=True")
        self._check_free(spec)
        self._subscribed.append(spec)
        running.subscriptions.publish(spec, subscriber, Received, lambda: self._subscribed.remove(spec))

    # --- open and closed ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Connect, and start to dispatch. After an error or a cancellation, nothing stays open.

        Raises:
            StoreUnavailableError, SinkUnavailableError: The store, a sink or a source did not answer within
                `open_timeout`. The error is that of the last attempt.
            StoreMismatchError: This version cannot use the store's data.
            ConfigurationError: `lanes` names something that is neither a handler nor a sink.
        """
        if self._running is not None or self._opening is not None:
            raise ClosedError("scheduler", "open already", "enter one 'async with' block, and share it inside")
        sinks = [sink for name, sink in self._sinks.items() if self._lanes is None or name in self._lanes]
        specs = [spec for spec in self._handlers.values() if self._serves(spec)]
        unknown = (self._lanes or frozenset()) - {sink.name for sink in sinks} - {spec.name for spec in specs}
        if unknown:
            known = ", ".join(sorted([*self._handlers, *self._sinks])) or "none"
            raise ConfigurationError("lanes", shortened(sorted(unknown)), f"names of handlers and sinks: {known}")
        sources = list(self._sources.values()) if self._reads_sources else []
        observer = self._observer()
        options = structs.replace(self._options, observer=observer)
        running = Running(self._store, sinks, sources, options, self._context)
        lanes = [lane for spec in specs for lane in (spec.name, *spec.aliases)] + [sink.name for sink in sinks]
        self._opening = running
        try:
            await running.open(dispatch=self._dispatch, lanes=lanes)
        finally:
            self._opening = None
        self._running, self._closing = running, asyncio.Lock()
        commands = CommandSender(
            running.commit, self._store.name, options.clock, options.store_timeout_ms, running.supersede
        )
        self._commands = commands if observer is None else observer.commands(commands)
        try:
            for sink in sinks:
                running.subscriptions.add_sink(sink)
            for spec in specs:
                running.subscriptions.add_handler(spec)
            for spec in specs if self._dispatch else ():
                await self.until_answered(
                    f"scheduling the series of {spec.name}", partial(self._schedule_series, spec.name)
                )
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def until_answered(self, what: str, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of one step of opening. Repeat the step for `open_timeout` (see `Patience`).

        Args:
            what: A description of the step, for the log.
            attempt: Does the step. It raises `StoreUnavailableError` or `SinkUnavailableError` if another attempt may
                succeed.

        Raises:
            ClosedError: The scheduler is not open.
        """
        return await self._ready().patience.answered(what, attempt)

    def _observer(self) -> Observer | None:
        places = [":".join(spec.source) for spec in self._handlers.values() if spec.source is not None]
        places += [to for to in self.targets.allowed or () if not to.endswith("*")]
        return self._observer_of(self._telemetry, self._store, self.namespace, places)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop claiming, and wait up to `drain` for messages in flight. Give back the rest, and disconnect."""
        async with self._closing:
            running = self._running
            if running is None:
                return
            try:
                await running.close()
            finally:
                self._running, self._commands, self._was_closed = None, None, True

    async def _schedule_series(self, name: Lane) -> None:
        message = self._series.get(name)
        if message is not None:
            put = self._composer.put(message, self._store.now_ms())
            await self._open_commands().carry_out(put, put.envelope.size)

    async def _schedule_series_soon(self, name: Lane, running: Running) -> None:
        """Store a series as soon as the store takes it, in a separate task: a failure must not end the loops."""
        while name in self._series and not running.is_closing:
            try:
                await self._schedule_series(name)
            except StoreError as error:
                log.warning("the series of handler %s is not scheduled yet: %s", name, error)
                await asyncio.sleep(SERIES_AGAIN_S)
            except AiodelayError:
                log.exception("the series of handler %s cannot be scheduled", name)
                return
            else:
                return

    @overload
    def lifespan(self, /) -> Callable[[object], AbstractAsyncContextManager[None]]: ...

    @overload
    def lifespan(
        self, own: Callable[[A], AbstractAsyncContextManager[S]], /
    ) -> Callable[[A], AbstractAsyncContextManager[S]]: ...

    def lifespan(
        self, own: Callable[[Any], AbstractAsyncContextManager[Any]] | None = None, /
    ) -> Callable[[Any], AbstractAsyncContextManager[Any]]:
        """Return a lifespan for FastAPI, Starlette and Litestar. The scheduler is open while the application serves.

        If opening raises, the server does not start. When the server stops, it first ends its requests. Then the
        scheduler closes, as at the end of its `async with` block.

        Args:
            own: A lifespan of your own. It surrounds the scheduler's, so that the resources of `own` exist until the
                last handler has ended. The application gets the value that `own` yields.

        Raises:
            ConfigurationError: `own` cannot be called with the application.
        """
        if own is not None and not callable(own):
            raise ConfigurationError(
                "lifespan", kind_of(own), "a function that takes the application and returns an async context manager"
            )

        @asynccontextmanager
        async def lifespan(app: object) -> AsyncIterator[object]:
            async with nullcontext() if own is None else own(app) as state, self:
                yield state

        return lifespan

    async def run(self) -> None:
        """Open, dispatch until cancelled, and close: the main task of a process that runs handlers.

        `aiodelay run module:scheduler` does the same, and closes the scheduler on SIGTERM and SIGINT.
        """
        async with self:
            await asyncio.get_running_loop().create_future()

    async def run_until_idle(self) -> None:
        """Return when the served lanes hold only recurring messages, and no message is in flight.

        This method is for scripts and examples. It waits for due times however far ahead they are. If a wait is longer
        than `drain`, the method logs one warning. While the store does not answer, the method asks the store again.

        Raises:
            ClosedError: The scheduler is being closed.
            StoreDamagedError: Another program has overwritten the store's data.
        """
        await self._ready().wait_until_idle()

    def reaches(self, sink: str) -> Reach:
        """Return how often a message may reach a sink from this scheduler's store, and why.

        Args:
            sink: The name of the sink: the part of `to=` before the colon.

        Raises:
            UnknownSinkError: This scheduler has no sink of that name.
        """
        found = self.sink(sink)
        if isinstance(self._store, Transfer):
            return self._store.reaches(found)
        reason = f"{self._store.name} and {sink} share no server or cluster: claimed, sent, settled"
        return Reach(Promise.AT_LEAST_ONCE, reason)

    def status(self) -> WorkStatus:
        """Return whether messages are dispatched yet, and, while a Kafka store opens, how much the store has read."""
        if self._running is not None:
            return self._running.status()
        if self._opening is None:
            return WorkStatus("ended", why="not open")
        found = self._store.status() if isinstance(self._store, Loads) else WorkStatus("loading")
        if found.phase == "ended":
            return found
        # A store that counts partitions has answered, so the reason of an earlier failed attempt no longer holds.
        why = found.why or ("" if found.of else self._opening.patience.reason)
        return structs.replace(found, phase="loading", why=why)

    def demand(self) -> Mapping[Lane, int]:
        """Return how many more messages each handler and sink requests now; empty while the scheduler is closed."""
        subscriptions = {} if self._running is None else self._running.subscriptions.by_lane
        return {lane: each.demand().messages for lane, each in subscriptions.items()}

    @property
    def in_flight(self) -> int:
        """The number of messages that this process has delivered and not settled yet; 0 while closed."""
        return 0 if self._running is None else self._running.subscriptions.in_flight

    def served(self) -> Sequence[Lane]:
        """Return the lanes that this process serves now, former names included; none while closed or closing."""
        if self._running is None or self._running.is_closing:
            return ()
        return self._running.subscriptions.lanes()

    @contextmanager
    def watch(self) -> Iterator[WakeUp]:
        """Give a wake-up that is set whenever this process has settled a message or can take another message."""
        with nullcontext(WakeUp()) if self._running is None else self._running.subscriptions.watch() as changed:
            yield changed

    @property
    def overdue_age_ms(self) -> int:
        """The age in ms of the oldest overdue message over all lanes, checked every 10 s; 0 = no message is overdue."""
        return 0 if self._running is None else self._running.overdue_age_ms

    def _ready(self) -> Running:
        if self._running is None:
            raise ClosedError("scheduler", "closed" if self._was_closed else "not open yet")
        self._running.check_usable()
        return self._running

    def _open_commands(self) -> Carrier:
        self._ready()
        assert self._commands is not None
        return self._commands

    def around_intake(
        self, topic: str, partition: int
    ) -> Callable[[Sequence[Put]], AbstractContextManager[Sequence[Put]]]:
        """Return a context manager that records telemetry while requests from a topic's partition are stored.

        Raises:
            ClosedError: The scheduler is not open.
        """
        observer = self._ready().observer
        return nullcontext if observer is None else lambda puts: observer.taken_in(topic, partition, puts)

    def _context(self, claim: Claim, lateness_ms: int, attempts: int) -> Context:
        return Context(claim, lateness_ms, attempts, self)

    # --- tests --------------------------------------------------------------------------------------------

    @contextmanager
    def moved_to(
        self, store: Store, sinks: Mapping[str, Sink], clock: Clock, note_run: Callable[[Record, int], None]
    ) -> Iterator[None]:
        """Use another store, other sinks and another clock inside a block, for `aiodelay.testing`.

        Inside the block, no source is read: a handler's messages come only from the store. If the block adds handlers
        and event types, the scheduler forgets them at the end of the block. `note_run` is called before every run.
        """
        if self._running is not None:
            raise ClosedError("scheduler", "open already", "move it to virtual time before it is opened")
        before = dict(self.__dict__)

        def context(claim: Claim, lateness_ms: int, attempts: int) -> Context:
            note_run(claim.record, lateness_ms)
            return Context(claim, lateness_ms, attempts, self)

        self._store, self._sinks, self._types = store, dict(sinks), self._types.copy()
        self._reads_sources = False
        self._options = structs.replace(self._options, clock=clock)
        self._composer = self._composer.moved_to(self._sinks, self._types)
        self._handlers, self._series, self._was_closed = dict(self._handlers), dict(self._series), False
        self._context = context  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.__dict__.clear()
            self.__dict__.update(before)


def _all_sinks(store: Store, given: list[Sink]) -> dict[str, Sink]:
    """Return the given sinks, and the store's sinks whose names were not given."""
    named = names_of(given)
    own = store.sinks if isinstance(store, Endpoints) else ()
    return {sink.name: sink for sink in own} | named


def _all_sources(store: Store, given: Collection[Source | str]) -> dict[str, Source]:
    """Return the given sources, and the store's sources whose names were not given."""
    named: dict[str, Source] = {}
    for source in map(registry.open_source, listed(given, "sources", "['redis-list://host']")):
        if source.name in named:
            raise ConfigurationError("sources", f"two sources named {source.name!r}", "one source per name")
        named[source.name] = source
    own = store.sources if isinstance(store, Endpoints) else ()
    return {source.name: source for source in own} | named


def _checked(value: object, type_: type[T], setting: str) -> T:
    if not isinstance(value, type_):
        raise ConfigurationError(setting, kind_of(value), f"a {type_.__qualname__}")
    return value


def _sized(message: object) -> tuple[Message, int]:
    """Return a message with the size 0: it is not encoded yet, so only the number of messages bounds a chunk."""
    return _checked(message, Message, "message"), 0


def _is_plain_function(value: object) -> bool:
    return callable(value) and not is_coroutine_function(value)


def _kind_of_function(value: object) -> str:
    return "a coroutine function, which nobody would await" if callable(value) else kind_of(value)


def _checked_lanes(lanes: object) -> frozenset[Lane]:
    return frozenset(check_type_name(lane, "lanes") for lane in listed(lanes, "lanes", "['payment.check']"))
