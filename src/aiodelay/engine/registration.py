"""The methods of `Scheduler` that register handlers: handler, add_handler, remove_handler, on_dead_letter."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from aiodelay.core.durations import Duration
from aiodelay.core.recurrence import Cron, Every
from aiodelay.core.retry import Retry
from aiodelay.core.values import DeadLetter, Lane, Limit
from aiodelay.errors import (
    AiodelayError,
    ClosedError,
    ConfigurationError,
    DuplicateHandlerError,
    StoreError,
    UnsupportedByStoreError,
    kind_of,
)
from aiodelay.handlers.registration import Decoder, Handler, is_coroutine_function, spec_of
from aiodelay.handlers.spec import HandlerSpec, OnFailure
from aiodelay.ports import Limits, Sink, Store

from .control import STORES_WITH_LIMITS
from .declared_limits import declare_limits
from .handler_set import HandlerSet
from .lifecycle import Running
from .sending.commands import Commands
from .sending.composer import Composer

__all__ = ["Registration"]

log: logging.Logger = logging.getLogger("aiodelay")

F = TypeVar("F", bound=Handler)
D = TypeVar("D", bound=Callable[[DeadLetter], Any])
SERIES_AGAIN_S = 1.0


class Registration(Commands):
    """The methods of `Scheduler` that register handlers. `Scheduler` inherits them.

    They build on `Commands`, because a handler with `every=` schedules a series.

    Args:
        store: The scheduler's store.
        sinks: The sinks by name.
        composer: Makes the commands that store messages.
        handlers: The set to which handlers are added.
        dead_letter_hooks: The list to which `on_dead_letter` adds functions.
    """

    def __init__(
        self,
        store: Store,
        sinks: Mapping[str, Sink],
        composer: Composer,
        handlers: HandlerSet,
        dead_letter_hooks: list[Callable[[DeadLetter], Awaitable[object]]],
    ) -> None:
        super().__init__(store, sinks, composer)
        self._handlers, self._dead_letter_hooks = handlers, dead_letter_hooks

    def decoders(self) -> Mapping[Lane, Decoder]:
        """Return the payload decoders by the name of the event type. Former names of event types are included."""
        return self._handlers.decoders()

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
        limit: Limit | Sequence[Limit] = (),
        batch: int | None = None,
        batch_wait: Duration | None = None,
        on_failure: OnFailure | None = None,
        gathered: bool = False,
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
        limit: Limit | Sequence[Limit] = (),
        batch: int | None = None,
        batch_wait: Duration | None = None,
        on_failure: OnFailure | None = None,
        gathered: bool = False,
    ) -> F | Callable[[F], F]:
        """Decorate a handler. The type of its first parameter is the event type that it handles.

        A coroutine function runs on the event loop, a plain function in a worker thread. A handler returns None,
        `Later(delay)` or `Reject(reason)`. An exception leads to a retry. After the first parameter, one parameter may
        be annotated `Context`. All other parameters need defaults or dependencies (`Depends`). Methods,
        `functools.partial`s and callable objects can be handlers too.

        If the first parameter is annotated `list[Event]`, the handler gets the messages in batches. It returns None, or
        a list with None, `Later` or `Reject` for each event, in order (docs/handlers.md, "Batches"). With
        `gathered=True`, it gets the events that gathered in one message instead.

        The decorated function can still be called directly.

        Args:
            function: The handler, if the decorator is used without parentheses.
            name: Only for handlers of bytes: the name that messages use, as `to="handler:<name>"`.
            concurrency: Most runs at once in this process. A batch is one run.
            timeout: The longest time for one run. If a coroutine exceeds this time, it is cancelled, which counts as a
                failed attempt.
            retry: The retry policy; None = the scheduler's retry policy.
            every: A rule by which an event recurs while any process serves this handler. The scheduler makes the event
                by calling the event type without arguments.
            source: `<source>:<address>`, such as `redis-list:orders`. The handler then takes messages from this address
                too, beside the messages that are scheduled for it. Retries and dead letters go to this scheduler's
                store.
            limit: Limits for the handler's messages, over all processes: at most one `Limit` with a key, and one
                without. If other programs schedule these messages, declare the limits with `@event` instead.
            batch: Only for a handler of `list[Event]`: the most messages of one run, 1 to 500; None = 100.
            batch_wait: Only for a handler of `list[Event]`: how long a message may wait until its batch is full, up to
                a minute; None = a run begins at once, with the messages that are there.
            on_failure: Only for a handler of `list[Event]`: what follows a run that fails. "halve", the default, runs
                the halves of the batch at once, until the messages that fail are alone. "retry_all" counts a failed
                attempt for each message.
            gathered: Only for a handler of `list[Event]`: the list has the events that gathered in one message
                (`Conflict.append()`), not the events of several messages. There is one outcome for the message.

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
                limit=limit,
                batch=batch,
                batch_wait=batch_wait,
                on_failure=on_failure,
                gathered=gathered,
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
        limit: Limit | Sequence[Limit] = (),
        batch: int | None = None,
        batch_wait: Duration | None = None,
        on_failure: OnFailure | None = None,
        gathered: bool = False,
    ) -> None:
        """Add a handler, also while the scheduler is open. Arguments and errors are those of `handler`."""
        spec = spec_of(
            function,
            types=self._handlers.types,
            name=name,
            concurrency=concurrency,
            timeout=timeout,
            retry=self._handlers.checked_retry(retry),
            source=self._handlers.checked_source(source),
            limit=limit,
            batch=batch,
            batch_wait=batch_wait,
            on_failure=on_failure,
            gathered=gathered,
        )
        self._handlers.check_free(spec)
        if spec.limits and not isinstance(self._store, Limits):
            raise UnsupportedByStoreError("limit", f"given to the handler of {spec.name}", STORES_WITH_LIMITS)
        if spec.name in self._sinks:
            raise DuplicateHandlerError("handler", f"named {spec.name!r}, like a sink", "a name that no sink has")
        self._handlers.add(spec, None if every is None else self._handlers.series_of(spec, every))
        if self._running is not None and self._handlers.serves(spec):
            if spec.limits:
                self._running.spawn(self._serve_limited(spec, self._running), f"aiodelay limits {spec.name}")
            else:
                self._running.subscriptions.add_handler(spec)
            if every is not None:
                self._running.spawn(
                    self._schedule_series_soon(spec.name, self._running), f"aiodelay series {spec.name}"
                )

    async def remove_handler(self, what: type | str) -> None:
        """Stop serving a handler. Return when the handler's messages in flight have settled.

        Runs that go on after `drain` are cancelled. Runs that still do not end are abandoned, as in closing
        (docs/guarantees.md).

        Args:
            what: The event class, or the handler's name.

        Raises:
            ConfigurationError: The scheduler has no such handler.
        """
        name = self._handlers.remove(what)
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
        name = self._handlers.set_concurrency(what, concurrency)
        if self._running is not None:
            self._running.subscriptions.set_concurrency(name, concurrency)

    async def _serve_limited(self, spec: HandlerSpec, running: Running) -> None:
        """Serve a handler as soon as the store has its limits, in a separate task: a failure must not end the loops."""
        while self._present(spec) and not running.is_closing:
            try:
                await declare_limits(self._store, [spec])
            except StoreError as error:
                log.warning("the limits of handler %s are not stored yet: %s", spec.name, error)
                await asyncio.sleep(SERIES_AGAIN_S)
            else:
                if present := self._present(spec):
                    running.subscriptions.add_handler(present)
                return

    def _present(self, spec: HandlerSpec) -> HandlerSpec | None:
        """Return the handler with its present concurrency; None if it was removed, or replaced by another."""
        present = self._handlers.specs.get(spec.name)
        return present if present is not None and present.limits is spec.limits else None

    async def _schedule_series(self, name: Lane) -> None:
        message = self._handlers.series.get(name)
        if message is not None:
            put = self._composer.put(message, self._store.now_ms())
            await self._open_commands().carry_out(put, put.envelope.size)

    async def _schedule_series_soon(self, name: Lane, running: Running) -> None:
        """Store a series as soon as the store takes it, in a separate task: a failure must not end the loops."""
        while name in self._handlers.series and not running.is_closing:
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
