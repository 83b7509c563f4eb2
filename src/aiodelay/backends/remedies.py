"""Causes of a failure, found by the words of its error, each with its remedy; every backend has a table of its own."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

__all__ = ["MEND", "NO_ANSWER", "UNKNOWN_HOST", "Cause", "explained", "with_remedy"]

MEND = "To mend it: "
"""Stands before the remedy in every text that has one; `aiodelay check` shows the remedy on a line of its own."""
UNKNOWN_HOST = ("Name or service", "nodename nor servname", "name resolution", "No address associated")
NO_ANSWER = ("Connect call failed", "Connection refused", "No route to host", "Network is unreachable")
"""Words of the operating system, on Linux and macOS."""


class Cause(Struct, frozen=True):
    """A cause of a failure.

    Attributes:
        signs: Words of the error; one of them is enough.
        mend: The remedy.
        meaning: What the error means, where its words do not say it.
    """

    signs: tuple[str, ...]
    mend: str
    meaning: str = ""


def explained(reason: str, causes: Sequence[Cause], *, whole: str = "") -> str:
    """Return a reason, followed by the meaning and the remedy of the first cause whose signs it has.

    Args:
        reason: Words of the error.
        causes: The known causes, the most telling one first.
        whole: The error's whole text, if the reason is a part of it.
    """
    for cause in causes:
        if any(sign in (whole or reason) for sign in cause.signs):
            return with_remedy(f"{reason.rstrip('. ')}; {cause.meaning}" if cause.meaning else reason, cause.mend)
    return reason


def with_remedy(reason: str, mend: str) -> str:
    """Return a reason with its remedy."""
    return f"{reason.rstrip('. ')}. {MEND}{mend}"
