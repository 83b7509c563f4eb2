"""A handler as the engine needs it: registration makes it of a function, the engine runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aiodelay.core.retry import Retry
from aiodelay.core.values import Lane
from aiodelay.errors import RecordFormatError, shortened

from .context import RunContext

__all__ = ["HandlerSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """A handler as the engine needs it.

    Attributes:
        name: The event's stable type name: its lane.
        aliases: Former names, served by the same demand.
        decode: Reads a payload, by its encoding.
        call: Calls the user's function with the event and, if it wants one, the context.
        is_coroutine: Whether `call` returns a coroutine; else it runs in a worker thread.
        concurrency: Most runs at once.
        timeout_ms: Longest run; None = no limit.
        types: What a message from a source may be of; None = anything.
        source: Name and address of where messages are taken from, beside the store.
        place: The function's module, name and line, for error messages.
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
    place: str = ""

    def check_type(self, type_: str) -> None:
        """Refuse a message of a type that is not the handler's: what is pushed to a list may be anybody's.

        Raises:
            RecordFormatError: Names both.
        """
        if type_ and self.types is not None and type_ not in self.types:
            raise RecordFormatError(f"it is of type {shortened(type_)}, not {self.name}")
