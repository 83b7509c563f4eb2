"""A reactive subscriber's subscription in the dispatch loop: like a handler's, but the subscriber sets the demand."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from aiodelay.core.values import Settlement, SettleOutcome
from aiodelay.errors import InputError, shortened
from aiodelay.handlers.context import RunContext
from aiodelay.handlers.received import GIVEN_BACK, HeldMessage
from aiodelay.ports.reactive import Subscriber

from . import settling
from .lease_book import Held
from .run_settlements import RunSettlements
from .runs import Run
from .subscription import HandlerSubscription

__all__ = ["Publication"]

log: logging.Logger = logging.getLogger("aiodelay.reactive")


class _MessageSettlements(RunSettlements):
    """Chooses the settlements of messages for a subscriber, who may give a message back, or settle it with an error."""

    def after_return(self, held: Held, result: object) -> Settlement:
        if result is GIVEN_BACK:
            return settling.release(held.claim.record, held.claim.token)
        if isinstance(result, Exception):
            return self.after_failure(held, result)
        return super().after_return(held, result)


@dataclass(slots=True, kw_only=True, eq=False)
class Publication(HandlerSubscription):
    """Signals one lane's messages to one subscriber. It is also the `Subscription` that the subscriber receives.

    `concurrency` counts the requested messages that are not settled yet. So the demand, which is `concurrency` minus
    the messages in flight, counts the requested messages that have not arrived yet.

    Args:
        subscriber: The subscriber; None once the subscription is over.
        received: Makes the subscriber's message from the event, its context, and a function that says whether the
            message is outdated.
        failure: A function that returns the error that ended the subscription; None for an orderly end.
        on_over: Called once, when the subscription is over. Delivered messages may still be settled then.
        leave: Called when the subscriber has cancelled. The call stops serving the lane once messages in flight have
            settled.
    """

    subscriber: Subscriber[Any] | None
    received: Callable[[Any, RunContext[Any], Callable[[], bool]], HeldMessage[Any, Any]]
    failure: Callable[[], Exception | None]
    on_over: Callable[[], None]
    leave: Callable[[Publication], None]
    concurrency: int = 0
    _shown: set[int] = field(default_factory=set)
    """The ids of the claims in flight that the subscriber has received."""
    _settlements_type: ClassVar[type[RunSettlements]] = _MessageSettlements

    def subscribe(self) -> None:
        """Call the subscriber's `on_subscribe`. The dispatch loop already serves this subscription."""
        assert self.subscriber is not None
        try:
            self.subscriber.on_subscribe(self)
        except Exception as error:  # noqa: BLE001 - a subscriber must not raise: `_break` ends the subscription
            self._break("on_subscribe", error)

    # --- calls of the subscriber --------------------------------------------------------------------------

    def request(self, n: int) -> None:
        """Request `n` more messages (D16-D19, D21). They arrive later, never inside this call."""
        if self.subscriber is None:
            return
        if not isinstance(n, int) or n < 1:
            raise InputError("request", shortened(n), "1 or more")
        self.concurrency += n
        self.on_free()

    def cancel(self) -> None:
        """End the subscription. No signal follows (D5, D17, D20)."""
        if self.subscriber is not None:
            self._end()
            self.leave(self)

    def _end(self) -> None:
        self.subscriber = None
        HandlerSubscription.drain(self)
        self.on_over()

    # --- calls of the engine ------------------------------------------------------------------------------

    def _room(self) -> int:
        return self.concurrency - len(self._shown)

    def settled(self, held: Held, outcome: SettleOutcome | None) -> None:
        """Forget a settled message, so that it no longer counts as requested."""
        if outcome is None:
            return
        if id(held) in self._shown:
            self._shown.remove(id(held))
            self.concurrency -= 1
        HandlerSubscription.settled(self, held, outcome)

    def drain(self) -> None:
        """Signal the end to the subscriber. Delivered messages may still be settled."""
        subscriber = self.subscriber
        if subscriber is None:
            return
        self._end()
        error = self.failure()
        try:
            if error is None:
                subscriber.on_complete()
            else:
                subscriber.on_error(error)
        except Exception:
            log.exception("%s: the subscriber raised an error in on_complete or on_error", self.lane)

    def _start(self, held: Held, event: object, context: RunContext[Any], started_s: float) -> Settlement | Run:
        assert self.subscriber is not None  # without a subscriber, the message would have been given back
        received = self.received(event, context, lambda: held.is_unwanted)
        self._shown.add(id(held))
        try:
            contextvars.copy_context().run(self.subscriber.on_next, received)
        except Exception as error:  # noqa: BLE001 - like a handler's exception, it is data for the retry policy
            self._break("on_next", error)
            received.settle(error)
        if received.is_settled:
            return self._settlements.after_return(held, received.result)
        return Run(held, started_s, self._result(received))

    async def _result(self, received: HeldMessage[Any, Any]) -> object:
        await received.over()
        return received.result

    def _break(self, signal: str, error: Exception) -> None:
        """Cancel the subscription, because the subscriber has raised. Rule D15 forbids a subscriber to raise."""
        log.error("%s: the subscriber's %s raised; the subscription is cancelled", self.lane, signal, exc_info=error)
        self.cancel()
