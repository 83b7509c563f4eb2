"""Claims due messages, and returns lapsed claims. A claim reads the heads of lanes first, and then writes leases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import itemgetter

from aiodelay.core import transitions as t
from aiodelay.core.fair_share import FairShare, Head
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Claim, Claimed, Demand, Lane

from .entry import Entry
from .lane_heads import LaneHead
from .limited_heads import LimitedHead
from .limits import FEATURE, prepare, read_limits
from .rows import object_text
from .tables import Tables

__all__ = ["ClaimCounter", "claim", "claim_again", "return_claims", "return_lapsed"]


class ClaimCounter:
    """Gives each claim a number, so that two claims at the same instant have different tokens.

    The numbers of a process start at random, so two processes may use the same number at the same instant, and give the
    same token. Even then, two claims of the same message differ: the message gets a new number when it returns to its
    lane. Only a message that lapses in a trial keeps its number, and the token of its next claim is higher.
    """

    def __init__(self) -> None:
        self._last = int.from_bytes(os.urandom(2), "big")

    def next(self) -> int:
        """Return the number for the next claim."""
        self._last += 1
        return self._last


class _Heads:
    """The heads of the lanes of one claim, for `FairShare`.

    A demanded lane has a head if the lane exists and is not paused.

    Args:
        tables: The tables, in a transaction.
        demand: The demand by lane.
    """

    def __init__(self, tables: Tables, demand: Mapping[Lane, Demand]) -> None:
        paused = tables.paused()
        most = {
            name: each.messages for lane, each in demand.items() if each.messages > 0 for name in (lane, *each.aliases)
        }
        self.numbers = {name: number for name in most if (number := tables.known_lane(name))}
        limited = read_limits(tables) if FEATURE in tables.features else {}
        tables.limited = frozenset(tables.lane_name(number) for number in limited)
        self._by_lane: dict[Lane, LaneHead] = {}
        for name, number in self.numbers.items():
            held = paused.get(number, ())
            if None not in held:
                addresses = frozenset(address for address in held if address is not None)
                if number in limited:
                    self._by_lane[name] = LimitedHead(tables, prepare(tables, limited[number]), addresses, most[name])
                else:
                    self._by_lane[name] = LaneHead(tables, number, addresses)
        self.all: list[LaneHead] = list(self._by_lane.values())

    def of(self, lanes: Sequence[Lane]) -> Head[Entry]:
        heads = [head for lane in lanes if (head := self._by_lane.get(lane))]
        return heads[0] if len(heads) == 1 else _MergedHead(heads)


class _MergedHead:
    """The heads of several lanes as one head. The earliest message of all lanes comes first."""

    def __init__(self, heads: Sequence[LaneHead]) -> None:
        self._heads = heads
        self._earliest: LaneHead | None = None

    def first(self) -> Entry | None:
        found = [(first.place_ms, first.n, first, head) for head in self._heads if (first := head.first()) is not None]
        if not found:
            return None
        _, _, first, self._earliest = min(found, key=itemgetter(0, 1))
        return first

    def take(self) -> None:
        if self._earliest is not None:
            self._earliest.take()

    def step_over(self) -> None:
        if self._earliest is not None:
            self._earliest.step_over()


def claim(
    tables: Tables, demand: Mapping[Lane, Demand], *, worker: str, holder: int, lease_ms: int, turn: int, number: int
) -> tuple[Claimed, list[int]]:
    """Lease due messages for a worker, by the rules of `core/fair_share.py`.

    Args:
        tables: The tables, in a transaction.
        demand: The demand by lane.
        worker: The worker id.
        holder: The number that names the worker in its leases.
        lease_ms: The duration of the leases in ms.
        turn: The number of this claim among the claims of the worker. It decides which lane the claim serves first.
        number: A number for the token, from `ClaimCounter`.

    Returns:
        The claimed messages, and the numbers of these messages in the same order.
    """
    return_lapsed(tables, MAX_CLAIM_MESSAGES)
    heads = _Heads(tables, demand)
    share = FairShare(demand, heads, turn=turn, most_tried=lambda: _most_tried(tables))
    entries = share.take()
    has_tried = share.is_trial and bool(entries)
    behind = {} if has_tried else {head.lane: head.behind_ms() for head in heads.all if head.has_aside}
    for head in heads.all:
        head.close()
    if tables.series_changed:
        read = {entry.n: entry.record for entry in tables.entries(tables.series_changed)}
        for entry in entries:
            entry.record = read.get(entry.n, entry.record)
    token = t.token_for(tables.now + lease_ms, number)
    _lease(tables, entries, token, holder)
    if has_tried:
        tables.trials.begin(entries, worker, lease_ms)
        tables.rules.begin_trial(entries)
    claims = [Claim(entry.record, token) for entry in entries]
    limited = tables.limited.intersection(heads.numbers)
    return Claimed(claims, tables.now, _next_due_ms(tables, heads, behind), limited), [entry.n for entry in entries]


def _most_tried(tables: Tables) -> int:
    return 0 if tables.trials.is_trying() else tables.trials.search().most


def _lease(tables: Tables, entries: Sequence[Entry], token: int, holder: int) -> None:
    """Write the leases of taken messages.

    One statement for each lane takes a third of the time of one statement for each message.
    """
    by_lane: dict[int, list[int]] = {}
    for entry in entries:
        by_lane.setdefault(entry.lane, []).append(entry.n)
    for lane, numbers in by_lane.items():
        query = "INSERT INTO leases (n, ns, lane, token, holder) SELECT value, ?, ?, ?, ? FROM json_each(?)"
        tables.execute(query, (tables.ns, lane, token, holder, object_text(sorted(numbers))))
    if tables.keeps_journal:
        for entry in entries:
            tables.note("claimed", entry.record, tables.now)


def _next_due_ms(tables: Tables, heads: _Heads, behind: Mapping[int, int | None]) -> int | None:
    """Return the earliest time at which the demanded lanes may have a message to claim: its due time or a lease's end.

    Args:
        tables: The tables, in a transaction.
        heads: The heads of the demanded lanes.
        behind: The lanes in which the claim left messages, with the place of the first message behind them. The next
            claim reads such a lane again after a second.
    """
    places = [behind[head.lane] if head.lane in behind else head.next_ms() for head in heads.all]
    found = [ms for ms in places if ms is not None] + [tables.now + t.TRIAL_MS] * bool(behind)
    lanes = set(heads.numbers.values())
    if lanes:
        in_doubt, (least, _) = tables.trials.in_doubt(), t.tokens_held(tables.now)
        leases = tables.execute("SELECT token, lane, n FROM leases WHERE ns = ? ORDER BY token", (tables.ns,))
        token = next(
            (token for token, lane, n in leases if lane in lanes and not (token < least and n in in_doubt)), None
        )
        found += [] if token is None else [t.token_deadline_ms(token)]
    return min(found, default=None)


def claim_again(
    tables: Tables, demand: Mapping[Lane, Demand], claims: Sequence[Claim], numbers: Sequence[int]
) -> Claimed:
    """Answer a repetition of a claim. Return the messages of the first claim whose leases still have its token."""
    standing = {entry.n: entry for entry in tables.entries(numbers)}
    held = [
        Claim(standing[n].record, claim.token)
        for claim, n in zip(claims, numbers, strict=True)
        if n in standing and standing[n].token == claim.token
    ]
    return Claimed(held, tables.now, _next_due_ms(tables, _Heads(tables, demand), {}))


def return_lapsed(tables: Tables, limit: int) -> int:
    """Return lapsed messages to their lanes. End a message that must not be tried again.

    A lease that ends too far ahead comes from a step of the clock. Its worker has some time to correct it. If this
    time is over (`Tables.is_righting_over`), the function handles the message as if the lease had ended.

    Returns:
        The number of messages that the call has handled, at most `limit`.
    """
    least, too_long = t.tokens_held(tables.now)
    in_doubt = tables.trials.in_doubt()
    query = "SELECT n FROM leases WHERE ns = ? AND token < ? ORDER BY token LIMIT ?"
    over = tables.execute(query, (tables.ns, least, limit + len(in_doubt)))
    numbers = [n for (n,) in over if n not in in_doubt][:limit]
    query = "SELECT n FROM leases WHERE ns = ? AND token >= ? ORDER BY token LIMIT ?"
    ahead = [n for (n,) in tables.execute(query, (tables.ns, too_long, limit - len(numbers)))]
    if ahead and tables.is_righting_over():
        numbers += ahead
    _lapse(tables, numbers)
    return len(numbers)


def return_claims(tables: Tables, holder: int, limit: int) -> int:
    """Return messages of a worker whose process has ended to their lanes, before their leases end.

    A suspect in a trial stays claimed until its lease ends: only the rules of trials may count the end of its process.

    Args:
        tables: The tables, in a transaction.
        holder: The number of the worker.
        limit: The most messages to return. If the function returns fewer, no message is left.
    """
    tables.check_features()
    query = """
        SELECT n FROM leases WHERE ns = ? AND holder = ? AND n NOT IN (SELECT n FROM trials) ORDER BY n LIMIT ?
    """
    numbers = [n for (n,) in tables.execute(query, (tables.ns, holder, limit))]
    _lapse(tables, numbers)
    return len(numbers)


def _lapse(tables: Tables, numbers: Sequence[int]) -> None:
    tables.has_new |= bool(numbers)
    for found in tables.entries(numbers):
        # If a retry of a series lapses, the row of the series changes. So an earlier lapse in this loop may have
        # changed this row. Read such a row again.
        entry = tables.entries([found.n])[0] if found.n in tables.series_changed else found
        tables.rules.lapse(entry, tables.now)
