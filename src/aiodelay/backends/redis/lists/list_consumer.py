"""`ListConsumer`: takes elements from a list under a lease. The sources of lists, topics and logs use it.

Each process that takes elements has one lease. If the lease lapses, the elements that this process holds return to the
list.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from msgspec import Struct

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.connection.wakeup_listener import ListListener
from aiodelay.backends.redis.records.elements import Element, ForeignElementError, decode_element
from aiodelay.core.transitions import (
    KILLS_TO_DEATH,
    NO_OP,
    after_trial,
    is_killer,
    is_late,
    is_release,
    returned,
    token_counter,
    token_deadline_ms,
    token_for,
)
from aiodelay.core.values import (
    LEASE_MS,
    Again,
    Claim,
    Claimed,
    Dead,
    Demand,
    Done,
    Envelope,
    Lane,
    LateAction,
    PutBack,
    Record,
    Renewal,
    RenewOutcome,
    Settlement,
    SettleOutcome,
    Stored,
)
from aiodelay.core.wakeup import WakeUp
from aiodelay.errors import RecordFormatError, StoreDamagedError, StoreUnavailableError

__all__ = ["ListConsumer", "Store", "Taken"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

LONGEST_WAIT_S = 30.0
_Key: TypeAlias = tuple[str, int, int]  # id, revision, the token's counter (it differs between copies of a message)
Store: TypeAlias = tuple[Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]], Callable[[], int]]
"""Two functions of the scheduler's store: the function that stores messages again, and its clock in epoch ms."""


class Taken(Struct, gc=False):
    """An element that this process has taken, and that it has neither settled nor lost.

    `missed` is the number of dropped messages that its claim reports.
    """

    number: int
    record: Record
    missed: int


class ListConsumer:
    """Takes elements from one list for one process.

    The elements get numbers in the order in which the process takes them. If a claim fails, the next claim sends the
    same first number again, and the server returns the same elements. Tokens and times use the scheduler's clock. The
    server of the list receives only durations.

    Args:
        client: The client of the list's server.
        name: The name of the list in error messages.
        keys: The keys of the scripts `take`, `drop` and `keep`. The first key is the list.
        consumer: The name of this process among the processes that take from the list.
        store: Two functions of the scheduler's store, which receives dead letters and retries.
    """

    _scripts: Mapping[str, str] = {}
    """The names of the scripts to run instead of `take`, `drop` and `again`, if a subclass has its own."""
    _advice = ""
    """The end of the error text about an element that another program has pushed."""
    _server_ms: Arg = ""
    """The time in epoch ms that the scripts use instead of the server's time; "" = they use the server's time."""

    def __init__(self, client: Client, name: str, keys: Sequence[str], consumer: str, *, store: Store) -> None:
        self._client, self._name, self._keys, self._consumer = client, name, keys, consumer
        self._put_back, self._now_ms = store
        self._next, self._shall_repeat, self._lease_ms = 1, False, LEASE_MS
        self._taken: dict[_Key, Taken] = {}
        self._wakeup = WakeUp()
        self._shall_listen, self._is_withheld = False, False
        self._told = self._untold = 0
        self._since = b""
        self.listener: ListListener = ListListener(client, keys[0], self._wakeup.set)

    async def _run(self, script: str, *arguments: Arg) -> Any:  # noqa: ANN401 - what the script returns
        try:
            name = self._scripts.get(script, script)
            return await self._client.run_on(name, self._keys, [self._server_ms, self._consumer, *arguments])
        except Fault as fault:
            if fault.is_damage:
                names = ", ".join(map(repr, self._keys))
                raise StoreDamagedError(
                    self._name, f"another program has written one of the keys {names} as another type ({fault.reason})"
                ) from fault
            raise StoreUnavailableError(self._name, fault.reason) from fault

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Claim elements for the handler of one lane. An element that no handler can take becomes a dead letter."""
        ((lane, wanted),) = demand.items()
        self._lease_ms, asked_ms = lease_ms, self._now_ms()
        arguments = (self._next, wanted.messages, wanted.max_bytes, lease_ms, int(self._shall_repeat))
        self._shall_repeat, known = True, len(self._taken)
        reply = await self._run("take", *arguments, self._told, wanted.max_lapses, self._since)
        now, ends, held, why, missed, told, since, *elements = reply
        server_ms, now_ms = int(now), self._now_ms()
        self._is_withheld = why != b""
        if since != self._since:  # The consumer was registered again, and counts from 0.
            self._since, self._told = since, 0
        self._note(why, int(missed) - max(int(told), self._told))
        self._told = int(missed)
        claims: list[Claim] = []
        taken: dict[_Key, Taken] = {}
        ended: dict[int, PutBack | None] = {}
        for number, element in enumerate(elements, self._next):
            if element is None:  # An earlier call of this claim has ended the element.
                continue
            judged = self._judged(element, lane, now_ms)
            if isinstance(judged, Element):
                record, pushed_ms = judged.record, judged.pushed_ms
                queued_ms = None if pushed_ms is None else max(server_ms - pushed_ms, 0)
                token = token_for(asked_ms + lease_ms, number)
                missed = 0 if claims else self._untold
                claims.append(Claim(record, token, queued_ms, missed))
                taken[record.envelope.id, record.revision, token_counter(token)] = Taken(number, record, missed)
            else:
                ended[number] = judged
        if held > known + len(elements):
            await self._give_back_strays(range(self._next, self._next + len(elements)))
        if ended:
            await self._end_unrun(ended)
        self._next += len(elements)
        self._shall_repeat = False
        self._taken.update(taken)
        self._untold = 0 if claims else self._untold
        self._shall_listen = not claims and not self._is_withheld
        if claims:  # The list may hold more elements, so claim again now. The listener waits only for an empty list.
            return Claimed(claims, now_ms, now_ms)
        return Claimed(claims, now_ms, now_ms + int(float(ends)) - server_ms if ends else None)

    def _note(self, why: bytes, missed: int) -> None:
        """Receive two results of the script `take` from `claim`. A subclass may record them; this class does nothing.

        Args:
            why: The reason why the consumer can take nothing, as the script `take` returns it; b"" = no such reason.
            missed: How many messages the topic or log has dropped before the consumer read them, apart from the
                messages that an earlier call has reported.
        """

    def _judged(self, element: bytes, lane: Lane, now_ms: int) -> Element | PutBack | None:
        """Return the element if a handler can take it, else its dead letter, or None to drop the element."""
        try:
            found = decode_element(element, lane=lane)
        except ForeignElementError as error:
            return _unreadable(element, lane, now_ms, error.problem + self._advice)
        except RecordFormatError as error:
            return _unreadable(element, lane, now_ms, error.problem)
        if is_killer(found.record):
            log.error(
                "message %s from %s is given up: it ended %d processes", found.record.id, self._name, KILLS_TO_DEATH
            )
            return PutBack(found.record, now_ms, "killed_worker")
        if is_late(found.record, now_ms):
            return PutBack(found.record, now_ms, "late") if found.record.late is LateAction.DEAD_LETTER else None
        return found

    async def _end_unrun(self, ended: Mapping[int, PutBack | None]) -> None:
        letters = [self._kept(letter) for letter in ended.values() if letter is not None]
        if letters:
            await self._put_back(letters)
        await self._run("drop", len(ended), *ended)

    async def _give_back_strays(self, just_taken: range) -> None:
        """Return stray elements to the list.

        The server counts a stray element as taken by this process, but this process does not hold it. Such elements
        exist after a failover, if the new server does not know that this process has ended them.
        """
        known = {*just_taken, *(taken.number for taken in self._taken.values())}
        try:
            numbers = [int(number) for number in await self._client.command("HKEYS", self._keys[2])]
        except Fault as fault:
            raise StoreUnavailableError(self._name, fault.reason) from fault
        await self._run("drop", 0, *(number for number in numbers if number not in known))

    # --- settling -----------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims.

        First store retries and dead letters in the scheduler's store. Then delete the ended elements, and return the
        elements that had no run to the list.
        """
        found = [self._taken.get(_key(settlement)) for settlement in settlements]
        leaving: list[tuple[Again | Dead, Taken]] = []
        over: list[int] = []
        back: list[int] = []
        for settlement, taken in zip(settlements, found, strict=True):
            if taken is None:
                continue
            if isinstance(settlement, Done):
                over.append(taken.number)
            elif is_release(taken.record, settlement):
                back.append(taken.number)
            else:
                leaving.append((settlement, taken))
        ended, settled = await self._leave(leaving)
        over += ended
        while over or back:
            letters = await self._run("drop", len(over), *over, *back)
            answered = list(zip(over + back, letters, strict=True))
            settled.update(number for number, letter in answered if letter == ord("s"))
            over, back = [], [number for number, letter in answered if letter == ord("m")]
        for settlement in settlements:
            taken = self._taken.pop(_key(settlement), None)
            if taken is not None and is_release(taken.record, settlement):
                self._untold += taken.missed  # no handler has read it
        if self._is_withheld:
            self._wakeup.set()
        return [
            SettleOutcome.SETTLED if taken is not None and taken.number in settled else SettleOutcome.GONE
            for taken in found
        ]

    async def _leave(self, pairs: Sequence[tuple[Again | Dead, Taken]]) -> tuple[list[int], set[int]]:
        """Store retries and dead letters.

        Return two groups of numbers: of the elements that the caller must still drop, and of the elements whose claims
        have ended already.
        """
        if not pairs:
            return [], set()
        numbers = [taken.number for _, taken in pairs]
        letters = await self._run("keep", self._lease_ms, *numbers)
        kept = [pair for pair, letter in zip(pairs, letters, strict=True) if letter == ord("r")]
        if kept:
            await self._put_back([self._kept(returned(taken.record, settlement)) for settlement, taken in kept])
        return [taken.number for _, taken in kept], set()

    def _kept(self, message: PutBack) -> PutBack:
        """Return the message unchanged, for the store. A subclass may change the message."""
        return message

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew the lease of this process, which covers all elements that it has taken.

        Return one outcome for each renewal.
        """
        found = [self._taken.get(_key(renewal)) for renewal in renewals]
        held = [each for each in found if each is not None]
        lease_ms = max(token_deadline_ms(renewal.to) for renewal in renewals) - self._now_ms()
        numbers = [
            f"a{each.number}" if renewal.ends_trial else each.number
            for renewal, each in zip(renewals, found, strict=True)
            if each is not None
        ]
        letters = await self._run("keep", lease_ms, *numbers) if held else b""
        kept = {each.number for each, letter in zip(held, letters, strict=True) if letter == ord("r")}
        outcomes: list[RenewOutcome] = []
        for renewal, each in zip(renewals, found, strict=True):
            if each is not None and each.number in kept:
                each.record = after_trial(each.record) if renewal.ends_trial else each.record
                outcomes.append(RenewOutcome.RENEWED)
            else:
                self._taken.pop(_key(renewal), None)
                outcomes.append(RenewOutcome.LOST)
        return outcomes

    def beat(self, ids: Collection[str]) -> None:
        """Record that this process is alive and holds its suspects. The caller is a thread without an event loop."""
        asyncio.run(self._beat())

    async def _beat(self) -> None:
        client = self._client.apart()
        try:
            await client.run_on("beat_source", self._keys, [self._server_ms, self._consumer])
        finally:
            await client.aclose()

    # --- waiting ------------------------------------------------------------------------------------------

    async def wait(self, *, until_ms: int | None) -> None:
        """Wait until there may be elements to take: new elements, or elements of a process whose lease has lapsed."""
        if self._shall_listen:
            self._ask()
        seconds = LONGEST_WAIT_S
        if until_ms is not None:
            seconds = min(seconds, (until_ms - self._now_ms()) / 1000)
        await self._wakeup.wait(seconds)

    def _ask(self) -> None:
        """Ask the listener to end the wait when the list has an element."""
        self.listener.ask()

    def wake(self) -> None:
        """End the current or next `wait`."""
        self._wakeup.set()

    def clear(self) -> None:
        """Forget all earlier wake-ups."""
        self._wakeup.clear()
        self._shall_listen = False


def _key(asked: Settlement | Renewal) -> _Key:
    return asked.id, asked.revision, token_counter(asked.token)


def _unreadable(element: bytes, lane: Lane, now_ms: int, problem: str) -> PutBack:
    """Return the dead letter of an unreadable element. Elements with equal bytes get the same id."""
    name = hashlib.sha256(element).hexdigest()[:32]
    log.warning("an element for %s cannot be read: %s; it is kept as dead letter %s", lane, problem, name)
    record = Record(Envelope(name, lane, payload=element), 0, now_ms, NO_OP, last_error=f"cannot be read: {problem}")
    return PutBack(record, now_ms, "undecodable")
