"""What one `Work` knows of the claims it was given: enough to end a plain one without the server reading it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.model import RETRY_WINDOW_MS, Done, Renewal, RenewOutcome, Settlement
from aiodelay.transitions import NO_OP

from .reading import record_at
from .scripts import Arg

__all__ = ["Held", "HeldClaims", "plain_arguments"]

MOST_HELD = 20_000
SLACK_MS = 1_000
"""How far the server's clock may be behind what we think it is."""
_FLAGS, _LANE, _REVISION, _REVISION_AND_DUE, _OP = 1, slice(2, 4), slice(4, 10), slice(4, 16), slice(26, 34)
_PREFIX_SIZE = 34
_RECURRING_OR_VERSIONED = 33
_TEXT, _OCCURRENCE = 2, 3


class Held(Struct, gc=False):
    """A claim given out: its id as Redis holds it, its token, its record's prefix, and how long the whole value is."""

    member: bytes
    token: int
    prefix: bytes
    size: int

    @property
    def is_plain(self) -> bool:
        """To end it is to delete it: it neither recurs, nor is a series' occurrence, nor carries a version."""
        return not self.prefix[_FLAGS] & _RECURRING_OR_VERSIONED and self.member[0] != _OCCURRENCE


class HeldClaims:
    """Claims given out, by id. A cache: what is not here is ended the longer way, with the same outcome."""

    def __init__(self) -> None:
        self._held: dict[str, Held] = {}

    def add(self, message_id: str, member: bytes, value: bytes, token: int) -> None:
        """Note what was given out."""
        if len(self._held) >= MOST_HELD:  # never settled: lost, or lapsed
            self._held.clear()
        at = record_at(value)
        self._held[message_id] = Held(member, token, value[at : at + _PREFIX_SIZE], len(value))

    def renewed(self, renewals: Iterable[Renewal], outcomes: Iterable[RenewOutcome]) -> None:
        """Note new tokens."""
        for renewal, outcome in zip(renewals, outcomes, strict=True):
            held = self._held.get(renewal.id)
            if held is not None and outcome in (RenewOutcome.RENEWED, RenewOutcome.CANCELLED):
                self._held[renewal.id] = replace(held, token=renewal.to)

    def take(self, settlement: Settlement) -> tuple[Held | None, bool]:
        """Return what is known of a claim that is to be ended, and whether it ends plainly; it is known no more."""
        held = self._held.pop(settlement.id, None)
        if held is None or held.token != settlement.token:
            return None, False
        return held, type(settlement) is Done and held.is_plain


def plain_arguments(ended: Sequence[Held], now_ms: int) -> tuple[list[Arg], list[int]]:
    """Write plain ends as `settle.lua` takes them.

    Args:
        ended: Claims.
        now_ms: The store's time.

    Returns:
        The arguments, and the order in which they name the claims.
    """
    lists: dict[tuple[bytes, int], list[int]] = {}
    memories: list[Arg] = []
    untils: dict[bytes, bytes] = {}
    for i, held in enumerate(ended):
        member, prefix = held.member, held.prefix
        lists.setdefault((prefix[_LANE], held.token), []).append(i)
        revision, op = prefix[_REVISION], prefix[_OP]
        until = untils.get(revision)
        if until is None:
            until = untils[revision] = _until(revision, now_ms)
        if until and op != NO_OP:
            memories += (b"o" + op, until + b"s" + prefix[_REVISION_AND_DUE])
        if member[0] == _TEXT:
            memories += (b"r" + member, revision)
    arguments: list[Arg] = [len(lists)]
    for (lane, token), indexes in lists.items():
        arguments += (int.from_bytes(lane, "big"), token, len(indexes))
        arguments += [ended[i].member for i in indexes]
    return [*arguments, len(memories), *memories], [i for indexes in lists.values() for i in indexes]


def _until(revision: bytes, now_ms: int) -> bytes:
    """Return until when an op is remembered; nothing where that is over."""
    until_ms = int.from_bytes(revision, "big") + RETRY_WINDOW_MS
    return until_ms.to_bytes(6, "big") if until_ms > now_ms - SLACK_MS else b""
