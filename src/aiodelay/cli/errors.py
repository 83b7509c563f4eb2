"""What a command says, in one line, when it cannot do what it was asked."""

from __future__ import annotations

__all__ = ["CommandError"]

FAILED, NOT_UNDERSTOOD = 1, 2


class CommandError(Exception):
    """Ends a command with a line on stderr.

    Args:
        text: What is wrong and what to write instead.
        exit_code: 1 failed, 2 the command line itself is wrong.
    """

    def __init__(self, text: str, *, exit_code: int = FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code
