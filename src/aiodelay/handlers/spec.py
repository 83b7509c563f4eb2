"""`HandlerSpec`: the facts that the engine needs to run a handler. `registration` makes it from a user's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from aiodelay.core.retry import Retry
from aiodelay.core.values import NO_LIMITS, Lane, LaneLimits
from aiodelay.errors import RecordFormatError, shortened

from .context import RunContext

__all__ = ["Batching", "HandlerSpec", "OnFailure"]

OnFailure: TypeAlias = Literal["halve", "retry_all"]
"""The reaction to a run of a batch that fails: run its halves at once, or retry all its messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How a handler of batches gets its messages.

    Attributes:
        size: Most messages of one run.
        wait_ms: The longest time for which a message waits until its batch is full.
        on_failure: What follows a run that fails.
    """

    size: int
    wait_ms: int
    on_failure: OnFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """The facts that the engine needs to run a handler.

    Attributes:
        name: The stable type name of the handler's events. It is also the name of the lane.
        aliases: Former type names. One demand covers all names.
        decode: Decodes a payload, given its encoding.
        call: Calls the user's function with the event and, if it has such a parameter, the context.
        is_coroutine: Whether `call` returns a coroutine. Otherwise the engine calls it in a worker thread.
        concurrency: Most runs at once.
        timeout_ms: Longest run; None = no limit.
        retry: The retry policy.
        types: The type names that a message from a source may have; None = any.
        source: Name and address of a source that also gives messages to the handler; None = only the store.
        limits: The limits that the code declares for the handler's messages in the store.
        place: The function's module, name and line, for error messages.
        batch: How the handler gets its batches; None for a handler of single messages. With batches, `call` takes a
            list of events, and `concurrency` counts the runs of batches.
    """

    name: Lane
    aliases: tuple[Lane, ...]
    decode: Callable[[bytes, str], Any]
    call: Callable[[Any, RunContext[Any]], Any]
    is_coroutine: bool
    concurrency: int
    timeout_ms: int | None
    retry: Retry
    types: frozenset[str] | None = None
    source: tuple[str, str] | None = None
    limits: LaneLimits = NO_LIMITS
    place: str = ""
    batch: Batching | None = None

    def check_type(self, type_: str) -> None:
        """Refuse a message of a type that the handler does not take: any program may push messages to a list.

        Raises:
            RecordFormatError: The message has another type. The error names both types.
        """
        if type_ and self.types is not None and type_ not in self.types:
            raise RecordFormatError(f"it is of type {shortened(type_)}, not {self.name}")
