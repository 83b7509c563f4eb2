"""The exit codes of commands, and the error that ends a command with one line on stderr."""

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
    """Ends a command with one line on stderr.

    Args:
        text: A sentence that says what is wrong and what to do.
        exit_code: One of the codes of this module.
    """

    def __init__(self, text: str, *, exit_code: int = FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def exit_code_of(error: AiodelayError) -> int:
    """Return the exit code of a command that ends with this error."""
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
    """If all errors of a group are of one kind, raise the first error without the group.

    `except*` cannot do this: before Python 3.11.4, an error raised in it is put into a group again.
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
