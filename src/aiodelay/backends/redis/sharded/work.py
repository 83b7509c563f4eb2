"""`ShardedWork`: the claims, settlements and housekeeping of one worker, over all shards of a namespace."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from heapq import merge
from typing import TypeVar, cast

from msgspec import Struct

from aiodelay.backends.redis.records.shards import shard_of
from aiodelay.backends.redis.store.store import RedisStore
from aiodelay.backends.redis.store.waiting import Waiter
from aiodelay.backends.redis.store.work import RedisWork
from aiodelay.core.ids import new_id
from aiodelay.core.transitions import TRIAL_MS, is_lease_over, is_suspect
from aiodelay.core.values import (
    Claim,
    Claimed,
    Demand,
    Lane,
    LaneState,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Tidied,
    WorkStatus,
    lanes_of,
)
from aiodelay.errors import StoreError, StoreTooNewError
from aiodelay.ports import PartialAnswerError

from .calls import all_of, answers_by_shard, outcomes_of
from .demands import Demands
from .dues import ShardDues

__all__ = ["ShardedWork"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

T = TypeVar("T", Settlement, Renewal)
R = TypeVar("R")

AGAIN_MS = 500
"""How long claims leave a shard alone that did not answer."""
TRIED_EVERY = 16
"""Each claim with such a number asks a shard for suspects first, in case that other messages always come first."""


class _Asked(Struct, frozen=True):
    """A call to a shard whose answer the caller has not got. The same call, repeated, returns the same messages."""

    request: str
    demand: Mapping[Lane, Demand]
    lease_ms: int
    ends_ms: int


class _Answers:
    """The answers of the shards to one claim.

    Attributes:
        claims: The claimed messages of each answer.
        errors: The errors of the shards that did not answer.
        away: The shards that did not answer, and that this claim does not ask again.
        asked: The shards that this claim has asked.
    """

    def __init__(self) -> None:
        self.claims: list[Sequence[Claim]] = []
        self.errors: list[StoreError] = []
        self.away: set[int] = set()
        self.asked: set[int] = set()

    @property
    def is_trial(self) -> bool:
        """Whether the claim has taken suspects. Then it takes nothing else."""
        return bool(self.claims) and is_suspect(self.claims[0][0].record)


class ShardedWork:
    """Claims, settles and tidies in all shards. It asks only shards that may have something due, at the same time.

    Args:
        shards: The stores of all shards, in order.
        works: The worker's work in each shard.
        waiter: The wait of the worker's loop.
        dues: When each shard next has something to claim. The waiters of the shards write into it too.
    """

    def __init__(
        self, shards: Sequence[RedisStore], works: Sequence[RedisWork], waiter: Waiter, dues: ShardDues
    ) -> None:
        self._shards, self._works, self._waiter, self._dues = shards, works, waiter, dues
        self._turn = self._tidied = self._first = 0
        self._unanswered: dict[int, _Asked] = {}
        self._suspected: set[int] = set()  # shards in which claims have stepped over suspects
        self._away: set[int] = set()  # shards whose last call failed
        self._request = ""
        self._given: dict[str, Claim] = {}

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Lease due messages for this worker. A repetition with the same request returns the same messages.

        The demand is divided between the shards that may have something due. If a shard surely has more than one claim
        takes, few shards are asked. The others are asked only for the messages that these leave. The shard that comes
        first changes with each claim. If a shard does not answer, the claim returns the messages of the other shards.
        """
        if request == self._request:
            return self._repeated()
        self._turn += 1
        wanted, answers = Demands(demand, len(self._shards), self._turn, self._first), _Answers()
        await self._repeat(wanted, answers)
        await self._try_suspects(wanted, answers, lease_ms, at_once=self._turn % TRIED_EVERY == 0)

        def is_due(shard: int, lanes: Sequence[Lane]) -> bool:
            return shard not in answers.away and self._is_due(shard, lanes, wanted.max_lapses)

        def has_more(shard: int, lanes: Sequence[Lane]) -> bool:
            # A silent shard costs the time limit of a call. So after the first, all other shards are asked together.
            return not answers.errors and any(self._dues.has_more(shard, lane) for lane in lanes)

        while not answers.is_trial and (parts := wanted.divided(is_due, has_more)):
            await self._ask(parts, wanted, answers, lease_ms)
        self._first = wanted.next_shard
        await self._try_suspects(wanted, answers, lease_ms, at_once=False)
        for shard in answers.asked - self._away:
            self._unanswered.pop(shard, None)
        if answers.errors and not answers.claims:
            self._check(answers.errors)
        claims = _merged(answers.claims)
        self._request, self._given = request, {claim.record.id: claim for claim in claims}
        now_ms = self._now_ms(0)
        next_by_lane = {lane: self._dues.next_ms([lane], now_ms) for lane in wanted.lanes}
        next_due_ms = min((each for each in next_by_lane.values() if each is not None), default=None)
        return Claimed(claims, now_ms, next_due_ms, next_by_lane=next_by_lane)

    def _now_ms(self, shard: int) -> int:
        return self._shards[shard].now_ms()

    def _is_due(self, shard: int, lanes: Iterable[Lane], max_lapses: int) -> bool:
        now_ms = self._now_ms(shard)
        return any(self._dues.is_due(shard, lane, now_ms, max_lapses=max_lapses) for lane in lanes)

    async def _repeat(self, wanted: Demands, answers: _Answers) -> None:
        """Repeat calls whose answers were lost, if the demand still allows their messages."""
        for shard, asked in list(self._unanswered.items()):
            if asked.ends_ms <= self._now_ms(shard):
                del self._unanswered[shard]
            elif not _fits(asked.demand, wanted.whole()):
                answers.away.add(shard)
            elif self._is_due(shard, wanted.lanes, wanted.max_lapses):
                await self._ask({shard: asked.demand}, wanted, answers, asked.lease_ms)

    async def _try_suspects(self, wanted: Demands, answers: _Answers, lease_ms: int, *, at_once: bool) -> None:
        """If the claim has no messages yet, ask shards for suspects, one after another. Stop once a shard gives some.

        Args:
            wanted: The demand.
            answers: The answers so far.
            lease_ms: Milliseconds until an unsettled claim may be claimed again.
            at_once: If True, ask a shard even if no claim has stepped over suspects there.
        """
        shards = len(self._shards)
        candidates = sorted(self._suspected, key=lambda each: (each - self._turn) % shards)
        for shard in candidates or ([self._turn // TRIED_EVERY % shards] if at_once else []):
            if answers.claims or not wanted.may_try:
                return
            if shard in answers.away | self._away:  # Its last call has to be repeated first.
                continue
            self._suspected.discard(shard)
            await self._ask({shard: wanted.whole()}, wanted, answers, lease_ms)

    async def _ask(
        self, parts: Mapping[int, Mapping[Lane, Demand]], wanted: Demands, answers: _Answers, lease_ms: int
    ) -> None:
        """Claim a part of the demand in each of some shards, at the same time."""
        for shard, part in parts.items():
            now_ms = self._now_ms(shard)
            if shard not in self._unanswered or self._unanswered[shard].demand is not part:
                self._unanswered[shard] = _Asked(new_id(), part, lease_ms, now_ms + lease_ms)
            self._dues.asked(shard, lanes_of(part), now_ms, max_lapses=wanted.max_lapses)
        calls = [
            self._works[shard].claim(part, request=self._unanswered[shard].request, lease_ms=lease_ms)
            for shard, part in parts.items()
        ]
        for shard, found in zip(parts, await outcomes_of(calls), strict=True):
            answers.asked.add(shard)
            if isinstance(found, Claimed):
                self._answered(shard, found, parts[shard], wanted, answers)
            elif isinstance(found, StoreError):
                self._failed(shard, found, parts[shard], answers)
            else:
                raise found

    def _answered(
        self, shard: int, found: Claimed, part: Mapping[Lane, Demand], wanted: Demands, answers: _Answers
    ) -> None:
        times = found.next_by_lane or {}
        self._dues.answered(shard, times)
        if shard in self._away:
            self._away.discard(shard)
            log.info("shard %d of %s answers again", shard, self._shards[shard].name)
        if found.claims:
            answers.claims.append(found.claims)
        wanted.took(shard, part, found.claims)
        has_left = len(found.claims) < sum(each.messages for each in part.values())
        if has_left and found.now_ms + TRIAL_MS in times.values():
            self._suspected.add(shard)

    def _failed(self, shard: int, error: StoreError, part: Mapping[Lane, Demand], answers: _Answers) -> None:
        answers.errors.append(error)
        answers.away.add(shard)
        self._dues.answered(shard, dict.fromkeys(lanes_of(part), self._now_ms(shard) + AGAIN_MS))
        if shard not in self._away:
            self._away.add(shard)
            if not self._shards[shard].is_stale:  # `Follower` logs moves.
                log.warning("shard %d does not answer: %s; the other shards go on", shard, error)

    def _check(self, errors: Sequence[StoreError]) -> None:
        """Raise an error if no shard answers, or if this process is too old for a shard."""
        for error in errors:
            if isinstance(error, StoreTooNewError) or len(self._away) == len(self._shards):
                raise error

    def _repeated(self) -> Claimed:
        now_ms = self._now_ms(0)
        held = [claim for claim in self._given.values() if not is_lease_over(claim.token, now_ms)]
        return Claimed(held, now_ms, now_ms)

    # --- settling -----------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims. Return one outcome for each settlement, in order."""
        for each in settlements:
            self._given.pop(each.id, None)

        async def settled(shard: int, part: Sequence[Settlement]) -> Sequence[SettleOutcome]:
            return await self._works[shard].settle(part)

        return await self._answered_by_shard(settlements, settled)

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases. Return one outcome for each renewal, in order."""
        for each in renewals:
            self._given.pop(each.id, None)

        async def renewed(shard: int, part: Sequence[Renewal]) -> Sequence[RenewOutcome]:
            return await self._works[shard].renew(part)

        return await self._answered_by_shard(renewals, renewed)

    async def _answered_by_shard(
        self, items: Sequence[T], call: Callable[[int, Sequence[T]], Awaitable[Sequence[R]]]
    ) -> Sequence[R]:
        """Make a call for each shard of a batch. If only shards whose nodes are away fail, give the other answers."""
        results, errors = await answers_by_shard(items, len(self._shards), _id_of, call)
        for shard, error in errors.items():
            if not self._shards[shard].is_away:
                raise error
        for error in errors.values():
            raise PartialAnswerError(self._shards[0].name, str(error), results) from error
        return cast("Sequence[R]", results)

    def beat(self, ids: Collection[str]) -> None:
        """Record that this process is alive and holds these suspects. The caller is a thread without an event loop."""
        for shard, work in enumerate(self._works):
            work.beat([each for each in ids if shard_of(each, len(self._works)) == shard])

    # --- waiting ------------------------------------------------------------------------------------------

    async def wait(self, *, until_ms: int | None) -> None:
        """Wait until there may be a message to claim, but at most until `until_ms`.

        A safety poll looks at all shards. It ends the wait only if the marks of a shard have changed.
        """
        poll_ms = self._shards[0].traits.safety_poll_ms
        while True:
            poll_s = poll_ms / 1000 * random.uniform(0.85, 0.97)
            until_s = poll_s if until_ms is None else self._shards[0].seconds_until_asking(until_ms)
            if await self._waiter.wait(min(poll_s, until_s), until_ms) or until_s < poll_s or await self._has_changed():
                return

    async def _has_changed(self) -> bool:
        changed = await all_of([work.has_changed() for work in self._works])
        for shard, has_changed in enumerate(changed):
            if has_changed:
                self._dues.comes_due(shard)
            else:
                self._dues.looked(shard, self._now_ms(shard))
        return any(changed)

    def wake(self) -> None:
        """End the current `wait` of this worker, or its next `wait`."""
        self._waiter.wake()

    def clear(self) -> None:
        """Forget all earlier wake-ups of this worker."""
        self._waiter.clear()

    # --- housekeeping -------------------------------------------------------------------------------------

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        """Do one bounded step of housekeeping in all shards."""
        self._tidied += 1
        share, more = divmod(limit, len(self._works))
        limits = [share + ((shard + self._tidied) % len(self._works) < more) for shard in range(len(self._works))]
        found = await all_of([work.tidy(lanes, limit=own) for work, own in zip(self._works, limits, strict=True)])
        return Tidied(
            max(each.now_ms for each in found),
            sum(each.lapsed for each in found),
            sum(each.expired for each in found),
            _lane_states(state for each in found for state in each.lanes),
        )

    def status(self) -> WorkStatus:
        """Return whether this version of aiodelay can still claim from all shards."""
        found = [work.status() for work in self._works]
        return next((each for each in found if each.phase != "ready"), found[0])


def _id_of(each: Settlement | Renewal) -> str:
    return each.id


def _fits(part: Mapping[Lane, Demand], whole: Mapping[Lane, Demand]) -> bool:
    return all(
        lane in whole
        and each.messages <= whole[lane].messages
        and each.max_bytes <= whole[lane].max_bytes
        and each.max_lapses <= whole[lane].max_lapses
        for lane, each in part.items()
    )


def _merged(answers: Sequence[Sequence[Claim]]) -> list[Claim]:
    """Return the claims of all answers, by lane and due time. The claims of a shard keep their order within a lane."""
    lanes: dict[Lane, list[list[Claim]]] = {}
    for answer in answers:
        own: dict[Lane, list[Claim]] = {}
        for claim in answer:
            own.setdefault(claim.record.envelope.lane, []).append(claim)
        for lane, claims in own.items():
            lanes.setdefault(lane, []).append(claims)
    return [claim for lists in lanes.values() for claim in merge(*lists, key=lambda each: each.record.due_ms)]


def _lane_states(states: Iterable[LaneState]) -> list[LaneState]:
    found: dict[Lane, LaneState] = {}
    for state in states:
        other = found.get(state.lane, state)
        oldest = [each.oldest_due_ms for each in (state, other) if each.oldest_due_ms is not None]
        found[state.lane] = LaneState(state.lane, min(oldest, default=None), state.served or other.served)
    return list(found.values())
