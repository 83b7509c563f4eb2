"""How a command ends: its exit code, and the line that says why it could not do what it was asked."""

from __future__ import annotations

from aiodelay.errors import (
    AiodelayError,
    DuplicateIdError,
    InputError,
    OutcomeUnknownError,
    StoreBusyError,
    StoreFullError,
    StoreUnavailableError,
)

__all__ = ["CommandError", "exit_code_of"]

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
