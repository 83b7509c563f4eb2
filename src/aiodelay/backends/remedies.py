"""Known causes of failures and their remedies, found by words in the error text. Each backend has its own table."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

__all__ = ["MEND", "NO_ANSWER", "UNKNOWN_HOST", "Cause", "explained", "with_remedy"]

MEND = "To fix it: "
"""The words between a problem and its remedy in an error text. `aiodelay check` shows the remedy on its own line."""
UNKNOWN_HOST = ("Name or service", "nodename nor servname", "name resolution", "No address associated")
NO_ANSWER = ("Connect call failed", "Connection refused", "No route to host", "Network is unreachable")
"""Words in the error texts of Linux and macOS."""


class Cause(Struct, frozen=True):
    """A known cause of a failure, and its remedy.

    Attributes:
        signs: Words to look for in the error text. One match is enough.
        mend: The remedy.
        meaning: The meaning of the error, if its own words are not clear; else "".
    """

    signs: tuple[str, ...]
    mend: str
    meaning: str = ""


def explained(reason: str, causes: Sequence[Cause], *, whole: str = "") -> str:
    """Add the meaning and the remedy of the first matching cause to the reason of a failure.

    If no cause matches, return the reason unchanged.

    Args:
        reason: The words of the error.
        causes: The known causes, the most specific cause first.
        whole: The whole text of the error, if the reason is only a part of that text.
    """
    for cause in causes:
        if any(sign in (whole or reason) for sign in cause.signs):
            return with_remedy(f"{reason.rstrip('. ')}; {cause.meaning}" if cause.meaning else reason, cause.mend)
    return reason


def with_remedy(reason: str, mend: str) -> str:
    """Add a remedy to the reason of a failure."""
    return f"{reason.rstrip('. ')}. {MEND}{mend}"
