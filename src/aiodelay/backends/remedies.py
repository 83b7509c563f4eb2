"""Finds the known cause and the remedy of a failure by words in its error text. Each backend has its own causes."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

__all__ = ["MEND", "NO_ANSWER", "UNKNOWN_HOST", "Cause", "explained", "with_remedy"]

MEND = "To fix it: "
"""The words between a problem and its remedy in an error text.

`aiodelay check` shows the remedy on a line of its own.
"""
UNKNOWN_HOST = ("Name or service", "nodename nor servname", "name resolution", "No address associated")
NO_ANSWER = ("Connect call failed", "Connection refused", "No route to host", "Network is unreachable")
"""Words in the error texts of Linux and macOS, for an unknown host and for a server that does not answer."""


class Cause(Struct, frozen=True):
    """A known cause of a failure, and its remedy.

    Attributes:
        signs: Words to look for in the error text. One match is enough.
        mend: The remedy, as an instruction.
        meaning: The meaning of the error, or "" if the error text is clear by itself.
    """

    signs: tuple[str, ...]
    mend: str
    meaning: str = ""


def explained(reason: str, causes: Sequence[Cause], *, whole: str = "") -> str:
    """Return the reason of a failure with the meaning and the remedy of the first cause that matches.

    If no cause matches, return the reason unchanged.

    Args:
        reason: The words of the error.
        causes: The known causes. A more specific cause comes before a more general cause.
        whole: The whole text of the error, if `reason` is only a part of it.
    """
    for cause in causes:
        if any(sign in (whole or reason) for sign in cause.signs):
            return with_remedy(f"{reason.rstrip('. ')}; {cause.meaning}" if cause.meaning else reason, cause.mend)
    return reason


def with_remedy(reason: str, mend: str) -> str:
    """Return the reason of a failure with its remedy."""
    return f"{reason.rstrip('. ')}. {MEND}{mend}"
