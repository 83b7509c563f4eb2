"""How a command ends: its exit code, and the line that says why it could not do what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from aiodelay.errors import (
    AiodelayError,
    DuplicateIdError,
    InputError,
    OutcomeUnknownError,
    StoreBusyError,
    StoreFullError,
    StoreUnavailableError,
)

__all__ = ["CommandError", "exit_code_of", "ungrouped"]

FAILED, NOT_UNDERSTOOD, NOT_FOUND, TOO_LATE, UNAVAILABLE, UNKNOWN = 1, 2, 3, 4, 5, 6


class CommandError(Exception):
    """Ends a command with a line on stderr.

    Args:
        text: What is wrong and what to write instead.
        exit_code: One of this module's.
    """

    def __init__(self, text: str, *, exit_code: int = FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def exit_code_of(error: AiodelayError) -> int:
    """Return what a command ends with that this error ended."""
    match error:
        case InputError():
            return NOT_UNDERSTOOD
        case DuplicateIdError():
            return TOO_LATE
        case StoreUnavailableError() | StoreBusyError() | StoreFullError():
            return UNAVAILABLE
        case OutcomeUnknownError():
            return UNKNOWN
    return FAILED


@contextmanager
def ungrouped(kind: type[Exception]) -> Iterator[None]:
    """Raise the first error of a group on its own, if all of them are of one kind.

    An error that is raised in an `except*` is put into a group again before Python 3.11.4.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        found, others = group.split(kind)
        if found is None or others is not None:
            raise
        first: BaseException = found
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
