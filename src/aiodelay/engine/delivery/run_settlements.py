"""The settlement of a claim whose handler has run. It depends on the handler's result or exception."""

from __future__ import annotations

import inspect
import logging
import random
from collections.abc import Callable

from aiodelay.core.retry import GiveUp
from aiodelay.core.values import DeadReason, Done, Settlement
from aiodelay.errors import HandlerResultError
from aiodelay.handlers.context import Later, Reject
from aiodelay.handlers.spec import HandlerSpec

from . import settling
from .lease_book import Held

__all__ = ["RunSettlements"]

log: logging.Logger = logging.getLogger("aiodelay.handlers")

OWN_FAULT_MS = 5_000
"""Delay of the next attempt after an error in aiodelay itself. The failed attempt does not count."""


class RunSettlements:
    """Chooses the settlements of one handler's runs, and logs failures.

    Args:
        spec: The handler.
        now_ms: The store's time.
    """

    def __init__(self, spec: HandlerSpec, now_ms: Callable[[], int]) -> None:
        self._spec, self._now_ms = spec, now_ms

    def after_own_fault(self, held: Held) -> Settlement:
        """Return the settlement after an error in aiodelay itself: another attempt after `OWN_FAULT_MS`."""
        record, due_ms = held.claim.record, self._now_ms() + OWN_FAULT_MS
        return settling.again(record, held.claim.token, held.began_ms, due_ms=due_ms, attempt=record.attempt)

    def after_failure(self, held: Held, error: BaseException) -> Settlement:
        """Return the settlement after a handler's exception: another attempt or a dead letter, by the retry policy."""
        if held.attempt is not None:
            held.attempt.failed(error)
        record, token = held.claim.record, held.claim.token
        attempt, text = record.attempt + 1, settling.error_text(error)
        decision = self._spec.retry.decide(attempt, error, random.random())
        raised = type(error), error, settling.users_traceback(error)
        if isinstance(decision, GiveUp):
            given_up = "%s: message %s is given up after attempt %d: %s"
            log.error(given_up, self._spec.name, record.id, attempt, text, exc_info=raised)
            traceback = settling.traceback_text(error)
            return settling.dead(
                record, token, held.began_ms, reason=decision.reason, attempt=attempt, error=text, traceback=traceback
            )
        log.warning("%s: attempt %d at %s failed: %s", self._spec.name, attempt, record.id, text)
        log.debug("%s: traceback of attempt %d at %s", self._spec.name, attempt, record.id, exc_info=raised)
        due_ms = self._now_ms() + decision.delay_ms
        return settling.again(record, token, held.began_ms, due_ms=due_ms, attempt=attempt, error=text)

    def would_give_up(self, held: Held, error: BaseException) -> bool:
        """Return whether the retry policy allows no further attempt after an exception."""
        decision = self._spec.retry.decide(held.claim.record.attempt + 1, error, random.random())
        return isinstance(decision, GiveUp)

    def after_return(self, held: Held, result: object) -> Settlement:
        """Return the settlement for a handler's result: None, `Later` or `Reject`. Any other result is a failure."""
        record, token = held.claim.record, held.claim.token
        if result is None and record.envelope.rule is None:
            return Done(record.envelope.id, record.revision, token)
        if result is None:
            return settling.done(record, token, held.began_ms)
        if isinstance(result, Later):
            return self._after_later(held, result)
        if isinstance(result, Reject):
            text = settling.kept(result.reason)
            log.error("%s: message %s is rejected: %s", self._spec.name, record.id, text)
            attempt = record.attempt + 1
            return settling.dead(record, token, held.began_ms, reason="rejected", attempt=attempt, error=text)
        if inspect.iscoroutine(result):
            result.close()
        return self.after_failure(held, HandlerResultError(self._spec.name, type(result).__name__))

    def _after_later(self, held: Held, later: Later) -> Settlement:
        record, token = held.claim.record, held.claim.token
        attempt = record.attempt + later.counts
        if later.counts and attempt >= self._spec.retry.attempts:
            text = f"the handler returned {later!r} on the last of its {attempt} attempts"
            log.error("%s: message %s is given up after attempt %d: %s", self._spec.name, record.id, attempt, text)
            reason: DeadReason = "attempts_exhausted"
            return settling.dead(record, token, held.began_ms, reason=reason, attempt=attempt, error=text)
        return settling.again(record, token, held.began_ms, due_ms=self._now_ms() + later.delay_ms, attempt=attempt)
