"""`Scheduler`, the object that users open. It checks arguments and connects the parts of aiodelay; it has no loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

from msgspec import structs

from .backends import registry
from .core.durations import Duration, parse_duration
from .core.event_codecs import codec_named
from .core.retry import Retry
from .core.validation import Targets, check_count, check_flag, check_instance, check_namespace, check_type_name, listed
from .core.values import Alarm, Claim, DeadLetter, Lane, Message, Put, Record, Scheduled
from .engine.control import Control
from .engine.delivery.message_stream import Messages
from .engine.handler_set import HandlerSet
from .engine.lifecycle import Running
from .engine.loops import RuntimeOptions
from .engine.observer import Observer
from .engine.registration import Registration
from .engine.sending.command_sender import CommandSender
from .engine.sending.composer import Composer, names_of
from .errors import ClosedError, ConfigurationError, kind_of, shortened
from .handlers.context import RunContext
from .handlers.middleware import Middleware
from .handlers.received import HeldMessage
from .handlers.registration import (
    check_concurrency,
    is_coroutine_function,
    is_plain_function,
    kind_of_function,
    taker_spec,
)
from .handlers.spec import HandlerSpec
from .ports import Endpoints, Sink, Source, Store
from .ports.clock import Clock, SystemClock
from .ports.reactive import Subscriber
from .telemetry import Telemetry

if TYPE_CHECKING:
    from .telemetry.observer import Observer as TelemetryObserver

__all__ = ["Context", "Received", "Scheduler"]

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
MOST_PAYLOAD = 1_000_000_000


class Scheduler(Control, Registration):
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
        claim_ahead: Whether a handler may claim messages before it has room to run them: as many as it has run in the
            last 20 ms, at most 1,000. False = only messages whose runs can begin at once.
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
        claim_ahead: bool = True,
        overdue_alarm: Duration = "60s",
        on_alarm: Callable[[Alarm], object] | None = None,
        telemetry: Telemetry | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.namespace: str = check_namespace(namespace)
        store = registry.open_store(store, namespace=self.namespace, clock=clock)
        all_sinks = _all_sinks(store, [registry.open_sink(sink) for sink in listed(sinks, "sinks", "['stdout:']")])
        all_sources, self._reads_sources = _all_sources(store, sources), True
        self._dispatch = check_flag(dispatch, "dispatch")
        handlers = HandlerSet(
            sources=all_sources,
            lanes=None if lanes is None else _checked_lanes(lanes),
            retry=Retry() if retry is None else check_instance(retry, Retry, "retry"),
        )
        self._telemetry = Telemetry() if telemetry is None else check_instance(telemetry, Telemetry, "telemetry")
        if open_timeout is None:  # in a process that only schedules, a caller waits for the error: fail at once
            open_timeout = "30s" if self._dispatch else "0s"
        if on_alarm is not None and not is_plain_function(on_alarm):
            raise ConfigurationError("on_alarm", kind_of_function(on_alarm), "a plain function that takes an Alarm")
        if clock is not None and not hasattr(clock, "now_ms"):
            raise ConfigurationError("clock", kind_of(clock), "a Clock")
        self._handle_middleware: list[Middleware[Context, Any]] = []
        dead_letter_hooks: list[Callable[[DeadLetter], Awaitable[object]]] = []
        self._options = RuntimeOptions(
            clock or SystemClock(),
            parse_duration(store_timeout, field="store_timeout", error=ConfigurationError, least_ms=1),
            parse_duration(open_timeout, field="open_timeout", error=ConfigurationError),
            parse_duration(drain, field="drain", error=ConfigurationError),
            parse_duration(overdue_alarm, field="overdue_alarm", error=ConfigurationError, least_ms=1),
            handlers.retry,
            on_alarm,
            self._handle_middleware,
            claims_ahead=check_flag(claim_ahead, "claim_ahead"),
            dead_letter_hooks=dead_letter_hooks,
        )
        if encoding not in ("json", "msgpack"):
            raise ConfigurationError("encoding", shortened(encoding), "'json' or 'msgpack'")
        self.targets: Targets = Targets(allowed_targets)
        composer = Composer(
            codec=codec_named(encoding),
            sinks=all_sinks,
            targets=self.targets,
            max_payload=check_count(max_payload, "max_payload", 1, MOST_PAYLOAD),
            traits=lambda: self._store.traits,
            types=handlers.types,
            checks_events=check_flag(check_events, "check_events"),
        )
        super().__init__(store, all_sinks, composer, handlers, dead_letter_hooks)
        self._closing = asyncio.Lock()
        # Import here, not at the top of the module: so `import aiodelay` stays fast. A later import could fail, because
        # the process may have no free file handles by then.
        from .telemetry.observer import observer_of  # noqa: PLC0415

        self._observer_of: Callable[[Telemetry, Store, str, list[str]], Observer | TelemetryObserver | None]
        self._observer_of = observer_of

    def __repr__(self) -> str:
        return f"<Scheduler {self._store.name} {'open' if self._running else 'closed'}>"

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
            types=self._handlers.types,
            retry=self._handlers.checked_retry(retry),
            source=self._handlers.checked_source(source),
        )
        return Messages(lambda subscriber: self._publish(spec, subscriber), check_concurrency(concurrency))

    def _publish(self, spec: HandlerSpec, subscriber: Subscriber[Received[Any]]) -> None:
        running = self._ready()
        if running.is_closing:
            raise ClosedError("scheduler", "closed")
        if not running.dispatches:
            raise ConfigurationError("messages", "called on a scheduler that does not dispatch", "dispatch=True")
        self._handlers.warn_of_places(spec, self._sinks)
        running.subscriptions.publish(spec, subscriber, Received, self._handlers.subscribe(spec))

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
        served = self._handlers.lanes
        sinks = [sink for name, sink in self._sinks.items() if served is None or name in served]
        specs = self._handlers.served()
        unknown = (served or frozenset()) - {sink.name for sink in sinks} - {spec.name for spec in specs}
        if unknown:
            known = ", ".join(sorted([*self._handlers.specs, *self._sinks])) or "none"
            raise ConfigurationError("lanes", shortened(sorted(unknown)), f"names of handlers and sinks: {known}")
        sources = list(self._handlers.sources.values()) if self._reads_sources else []
        observer = self._observer()
        options = structs.replace(self._options, observer=observer)
        running = Running(self._store, sinks, sources, options, self._context)
        lanes = [lane for spec in specs for lane in (spec.name, *spec.aliases)] + [sink.name for sink in sinks]
        self._opening = running
        try:
            await running.open(dispatch=self._dispatch, lanes=lanes, specs=specs)
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
                self._handlers.warn_of_places(spec, self._sinks)
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

    def _observer(self) -> Observer | TelemetryObserver | None:
        places = [":".join(spec.source) for spec in self._handlers.specs.values() if spec.source is not None]
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

    def around_intake(
        self, topic: str, partition: int
    ) -> Callable[[Sequence[Put]], AbstractContextManager[Sequence[Put]]]:
        """Return a context manager that records telemetry while requests from a topic's partition are stored.

        Raises:
            ClosedError: The scheduler is not open.
        """
        observer = self._ready().observer
        return nullcontext if observer is None else lambda puts: observer.taken_in(topic, partition, puts)

    def _context(self, claim: Claim, lateness_ms: int, retry: Retry) -> Context:
        return Context(claim, lateness_ms, retry, self)

    # --- tests --------------------------------------------------------------------------------------------

    def observed_by(self, observer: Observer) -> None:
        """Report the events of later openings to an observer, not to telemetry, for `aiodelay.testing`.

        Raises:
            ClosedError: The scheduler is already open.
        """
        if self._running is not None:
            raise ClosedError("scheduler", "open already", "observe it before it is opened")
        self._observer_of = lambda *_: observer

    @contextmanager
    def moved_to(
        self, store: Store, sinks: Mapping[str, Sink], clock: Clock, note_run: Callable[[Record, int], None]
    ) -> Iterator[None]:
        """Use another store, other sinks and another clock inside a block, for `aiodelay.testing`.

        Inside the block, no source is read: a handler's messages come only from the store. If the block adds handlers,
        event types and middleware, the scheduler forgets them at the end of the block. `note_run` is called before
        every run.
        """
        if self._running is not None:
            raise ClosedError("scheduler", "open already", "move it to virtual time before it is opened")
        before = dict(self.__dict__)

        def context(claim: Claim, lateness_ms: int, retry: Retry) -> Context:
            note_run(claim.record, lateness_ms)
            return Context(claim, lateness_ms, retry, self)

        self._store, self._sinks, self._handlers = store, dict(sinks), self._handlers.copy()
        self._reads_sources, self._was_closed = False, False
        self._handle_middleware = list(self._handle_middleware)
        self._schedule_middleware = list(self._schedule_middleware)
        self._options = structs.replace(self._options, clock=clock, middleware=self._handle_middleware)
        self._composer = self._composer.moved_to(self._sinks, self._handlers.types)
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


def _checked_lanes(lanes: object) -> frozenset[Lane]:
    return frozenset(check_type_name(lane, "lanes") for lane in listed(lanes, "lanes", "['payment.check']"))
