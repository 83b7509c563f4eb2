"""`RedisWork`: the claims, settlements and housekeeping of one worker."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Mapping, Sequence

import msgspec

from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import member_of, text_of
from aiodelay.backends.redis.records.reading import Lanes, read_record
from aiodelay.core.features import VersionCheck
from aiodelay.core.values import (
    Claim,
    Claimed,
    Dead,
    Demand,
    Lane,
    LaneState,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Tidied,
    WorkStatus,
)
from aiodelay.errors import RecordFormatError, StoreError

from .glance import Marks
from .lease_arguments import (
    CHANGE_COST,
    NOT_HELD,
    RENEWED,
    RENEWED_AT_ONCE,
    ROOM,
    SETTLED,
    cost_of_change,
    divided,
    renewal_arguments,
    settlement_arguments,
)
from .lease_cache import Held, LeaseCache, plain_arguments
from .pulse import RedisPulse
from .transfer import Transfers
from .waiting import Waiter
from .workers import SERVED_WINDOW_MS, served_lanes

__all__ = ["RedisWork"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

TIDIED_AT_ONCE = 40
_EMPTY = b"-"
"""The answer of `claim.lua` about a lane that is empty."""
CLOCK_STEP_MS = 1_000
"""If the server's clock differs from this process's estimate by more, it has stepped. Leases may then end earlier."""


class RedisWork:
    """The object with which one worker claims, settles and tidies.

    Args:
        store: The store that holds the messages.
        worker: The worker id.
        waiter: The wait of the worker's loop; None = a new one.
        pulse: The worker's sign of life; None = a new one.

    Attributes:
        pulse: The worker's sign of life.
    """

    def __init__(
        self, store: Transfers, worker: str, waiter: Waiter | None = None, pulse: RedisPulse | None = None
    ) -> None:
        self._store, self._worker = store, worker
        self.pulse: RedisPulse = pulse or store.new_pulse()
        self.waiter: Waiter = waiter or Waiter()
        self._held = LeaseCache()
        self._turn = 0
        self._last = ""
        self._is_answered = False
        self._version = VersionCheck()
        self._marks: Marks = ()
        self._moved_look_ms: int | None = None

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Lease due messages for this worker. A repetition with the same request returns the same messages."""
        if request != self._last:
            self._last, self._is_answered = request, False
            self._turn += 1
        self._marks = ()
        watched = self._store.moved_lanes()
        arguments: list[Arg] = [lease_ms, self._worker, request, int(self._is_answered)]
        arguments.append(min((each.max_lapses for each in demand.values()), default=0))
        shared = self._store.shared_lanes()
        demanded: list[Arg] = [len(watched), *watched, len(shared), *shared]
        names: list[Lane] = []
        for lane, each in self._in_turn(demand):
            demanded += [each.messages, each.max_bytes, 1 + len(each.aliases), lane, *each.aliases]
            names += [lane, *each.aliases]
        asked_s = asyncio.get_running_loop().time()
        with self._version.noted(), self.pulse.call() as call:
            reply = await self._store.run("claim", [*arguments, *call.arguments, *demanded])
            call.answered(reply[6])
        self._is_answered = True
        now_ms = self._store.heard(reply[0], asked_s)
        signed = dict(zip(names, map(int, reply[3].split()), strict=True))
        numbers = {lane: abs(number) for lane, number in signed.items()}
        self._moved_look_ms, self._marks = int(reply[4]) if reply[4] else None, reply[5]
        self._store.looked_at_moved(self._moved_look_ms)
        claims = await self._read(reply[7:], int(reply[2] or 0), numbers)
        limited = frozenset(lane for lane, number in signed.items() if number < 0)
        times = [None if each == _EMPTY else int(each) for each in reply[1].split()]
        next_due_ms = min((each for each in times if each is not None), default=None)
        return Claimed(claims, now_ms, next_due_ms, limited, dict(zip(names, times, strict=True)))

    def _in_turn(self, demand: Mapping[Lane, Demand]) -> list[tuple[Lane, Demand]]:
        wanted = [(lane, each) for lane, each in demand.items() if each.messages > 0]
        first = self._turn % len(wanted) if wanted else 0
        return wanted[first:] + wanted[:first]

    async def _read(self, pairs: Sequence[bytes], token: int, numbers: Mapping[Lane, int]) -> list[Claim]:
        """Decode claimed messages and return their claims. An unreadable message becomes a dead letter instead."""
        lanes = Lanes(numbers)
        members, values = pairs[::2], pairs[1::2]
        held: list[Held] = []
        unreadable: list[Settlement] = []
        for member, value in zip(members, values, strict=True):
            try:
                record = read_record(member, value, lanes)
            except RecordFormatError as error:
                log.warning(
                    "message %r cannot be read: %s; it is kept as a dead letter", text_of(member), error.problem
                )
                unreadable.append(Dead(text_of(member), 0, token, "undecodable", 0, error.problem))
            else:
                held.append(Held(member, numbers[record.envelope.lane], Claim(record, token)))
        self._held.add(held)
        if unreadable:
            await self.settle(unreadable)
        return [each.claim for each in held]

    # --- settling -----------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims. Return one outcome for each settlement, in order."""
        has_journal = self._store.keeps_journal
        plain: list[tuple[int, Held]] = []
        others: list[tuple[int, Settlement, int]] = []
        for i, (settlement, held) in enumerate(zip(settlements, self._held.take(settlements), strict=True)):
            if held is not None and not has_journal and held.is_plain(settlement):
                plain.append((i, held))
            else:
                others.append((i, settlement, cost_of_change(held)))
        letters: dict[int, int] = {}
        for of_plain, of_others in divided(plain, others):
            letters |= await self._settle(of_plain, of_others)
        not_held = [(i, settlements[i], CHANGE_COST) for i, letter in letters.items() if letter == NOT_HELD]
        for _, of_others in divided((), not_held):
            letters |= await self._settle((), of_others)
        if others:
            self._store.waiters.wake()
        return [SETTLED[letters[i]] for i in range(len(settlements))]

    async def _settle(
        self, plain: Sequence[tuple[int, Held]], others: Sequence[tuple[int, Settlement, int]]
    ) -> dict[int, int]:
        arguments, order = plain_arguments([held for _, held in plain], self._store.now_ms())
        for _, settlement, _ in others:
            arguments += settlement_arguments(settlement)
        letters: bytes = await self._store.run("settle", arguments)
        if letters.endswith(ROOM):
            self._store.waiters.wake()
        indexes = [plain[i][0] for i in order] + [i for i, _, _ in others]
        return dict(zip(indexes, letters.removesuffix(ROOM), strict=True))

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases. Return one outcome for each renewal, in order."""
        outcomes: list[RenewOutcome] = []
        while left := renewals[len(outcomes) : len(outcomes) + RENEWED_AT_ONCE]:
            asked_s = asyncio.get_running_loop().time()
            with self.pulse.call() as call:
                now, letters, number = await self._store.run("renew", [*call.arguments, *renewal_arguments(left)])
                call.answered(number)
            self._store.heard(now, asked_s)
            found = [RENEWED[letter] for letter in letters]
            self._held.renewed(left[: len(found)], found)
            outcomes += found
        return outcomes

    # --- waiting ------------------------------------------------------------------------------------------

    async def wait(self, *, until_ms: int | None) -> None:
        """Wait until there may be a message to claim, but at most until `until_ms`.

        A safety poll ends the wait only if the marks of the store are no longer the same as at the last claim.
        """
        while True:
            poll_s = self._store.traits.safety_poll_ms / 1000 * random.uniform(0.85, 0.97)
            until_s = poll_s if until_ms is None else self._store.seconds_until_asking(until_ms)
            if await self.waiter.wait(min(poll_s, until_s), until_ms) or until_s < poll_s or await self.has_changed():
                return

    async def has_changed(self) -> bool:
        """Return False if a claim would surely find nothing, and the same next times as the last claim."""
        if not self._marks:
            return True
        expected_ms, asked_s = self._store.now_ms(), asyncio.get_running_loop().time()
        try:
            now_ms, marks = await self._store.glance.look()
        except StoreError:
            return True  # The next claim raises the error.
        if self._store.has_own_clock:
            now_ms = expected_ms
        self._store.heard(b"%d" % now_ms, asked_s)
        if list(marks) != list(self._marks) or abs(now_ms - expected_ms) > CLOCK_STEP_MS:
            return True
        self._store.looked_at_moved(self._moved_look_ms)
        return False

    def wake(self) -> None:
        """End the current `wait` of this worker, or its next `wait`."""
        self.waiter.wake()

    def clear(self) -> None:
        """Forget all earlier wake-ups of this worker."""
        self.waiter.clear()

    # --- housekeeping -------------------------------------------------------------------------------------

    async def tidy(self, lanes: Collection[Lane], *, limit: int) -> Tidied:
        """Do one bounded step of housekeeping for all lanes.

        Return how much the step did, and the state of the lanes.
        """
        serves = msgspec.msgpack.encode([0, *sorted(lanes)])
        lapsed = expired = 0
        while True:
            step = min(TIDIED_AT_ONCE, limit - max(lapsed, expired))
            asked_s = asyncio.get_running_loop().time()
            with self._version.noted():
                reply = await self._store.run("tidy", [step, self._worker, serves, SERVED_WINDOW_MS])
            lapsed, expired = lapsed + int(reply[1]), expired + int(reply[2])
            if not max(int(reply[1]), int(reply[2])) or max(lapsed, expired) >= limit:
                break
        now_ms = self._store.heard(reply[0], asked_s)
        served = served_lanes(reply[3], now_ms)
        states = [
            LaneState(name, int(oldest) if oldest else None, name in served)
            for name, oldest in zip(map(bytes.decode, reply[4][::2]), reply[4][1::2], strict=True)
        ]
        if any(state.oldest_due_ms is not None and state.lane in lanes for state in states):
            self._store.waiters.wake()  # A script that failed may have stored a message without changing the marks.
        return Tidied(now_ms, lapsed, expired, states)

    def beat(self, ids: Collection[str]) -> None:
        """Record that this process is alive and holds these suspects. The caller is a thread without an event loop."""
        asyncio.run(self._store.run_apart("beat", [self._worker, *map(member_of, ids)]))

    def status(self) -> WorkStatus:
        """Return whether this version of aiodelay can still claim from the store."""
        return self._version.status()
