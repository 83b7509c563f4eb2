"""Lists as a source: `@scheduler.handler(source="redis-list:<key>")`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from msgspec import Struct

from aiodelay.errors import RecordFormatError, StoreUnavailableError
from aiodelay.identifiers import new_id
from aiodelay.model import (
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
from aiodelay.ports import Feed
from aiodelay.transitions import (
    KILLS_TO_DEATH,
    NO_OP,
    after_renewal,
    is_killer,
    is_late,
    is_release,
    returned,
    token_counter,
    token_deadline_ms,
    token_for,
)
from aiodelay.urls import UrlOptions
from aiodelay.wakeup import WakeUp

from .client import Client
from .elements import Element, decode_element
from .faults import Fault
from .lists import ListEnd, split_address
from .options import read_options
from .scripts import Arg
from .waking import ListListener, listening

__all__ = ["RedisListSource", "open_list_source"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

LONGEST_WAIT_S = 30.0
_Key: TypeAlias = tuple[str, int, int]  # id, revision, the token's counter: of copies of a message each has its own
_PutBackCall: TypeAlias = Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]]


class RedisListSource(ListEnd):
    """Takes messages from the left end of Redis lists; an address is a list's key, as of `RedisListSink`.

    What a process has taken is its own until its lease ends; then it returns to the head of the list. Retries and dead
    letters go to the scheduler's store.

    Args:
        server: A URL as of a Redis store.

    Raises:
        ConfigurationError: The URL cannot be used.
    """

    @asynccontextmanager
    async def feed(
        self, address: str, consumer: str, put_back: _PutBackCall, now_ms: Callable[[], int]
    ) -> AsyncIterator[Feed]:
        """Open the taking of messages from a list."""
        assert self._client is not None
        feed = _ListFeed(self._client, self.options.name, address, consumer, store=(put_back, now_ms))
        async with listening(feed.listener, f"aiodelay redis list {address}"):
            yield feed


class _Taken(Struct, gc=False):
    """An element that was taken, and neither settled nor lost."""

    number: int
    record: Record


class _ListFeed:
    """One process's taking from one list.

    Elements are numbered as they are taken. A claim that failed is repeated with the same first number, which gives the
    same elements. Tokens and times are on the scheduler's clock; the list's server is told durations only.
    """

    def __init__(
        self, client: Client, server: str, address: str, consumer: str, *, store: tuple[_PutBackCall, Callable[[], int]]
    ) -> None:
        key, self._is_raw = split_address(address)
        tagged = f"{key}:" if "{" in key else f"{{{key}}}"
        self._keys = [key, f"{tagged}:aiodelay:consumers", f"{tagged}:aiodelay:taken:{consumer}"]
        self._client, self._name, self._consumer = client, f"list {key} at {server}", consumer
        self._put_back, self._now_ms = store
        self._next, self._shall_repeat, self._lease_ms = 1, False, LEASE_MS
        self._taken: dict[_Key, _Taken] = {}
        self._wakeup = WakeUp()
        self._shall_listen = False
        self.listener = ListListener(client, key, self._wakeup.set)

    async def _run(self, script: str, *arguments: Arg) -> Any:  # noqa: ANN401 - what the script returns
        try:
            return await self._client.run_on(script, self._keys, ["", self._consumer, *arguments])
        except Fault as fault:
            raise StoreUnavailableError(self._name, fault.reason) from fault

    # --- claims -------------------------------------------------------------------------------------------

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Take elements for one lane's handler; what can never be handled is given up on the way."""
        ((lane, wanted),) = demand.items()
        self._lease_ms, asked_ms = lease_ms, self._now_ms()
        arguments = (self._next, wanted.messages, wanted.max_bytes, lease_ms, int(self._shall_repeat))
        self._shall_repeat, known = True, len(self._taken)
        now, ends, held, *elements = await self._run("take", *arguments)
        server_ms, now_ms = int(now), self._now_ms()
        claims: list[Claim] = []
        taken: dict[_Key, _Taken] = {}
        ended: dict[int, PutBack | None] = {}
        for number, element in enumerate(elements, self._next):
            if element is None:  # it was ended by an earlier try
                continue
            judged = self._judged(element, lane, now_ms)
            if isinstance(judged, Element):
                record, pushed_ms = judged.record, judged.pushed_ms
                queued_ms = None if pushed_ms is None else max(server_ms - pushed_ms, 0)
                token = token_for(asked_ms + lease_ms, number)
                claims.append(Claim(record, token, queued_ms))
                taken[record.envelope.id, record.revision, token_counter(token)] = _Taken(number, record)
            else:
                ended[number] = judged
        if held > known + len(elements):
            await self._give_back_strays(range(self._next, self._next + len(elements)))
        if ended:
            await self._end_unrun(ended)
        self._next += len(elements)
        self._shall_repeat = False
        self._taken.update(taken)
        self._shall_listen = not claims
        if claims:  # there may be more: only a list that gave nothing is listened to
            return Claimed(claims, now_ms, now_ms)
        return Claimed(claims, now_ms, now_ms + int(float(ends)) - server_ms if ends else None)

    def _judged(self, element: bytes, lane: Lane, now_ms: int) -> Element | PutBack | None:
        """Return an element that can be handled; else what is kept of it, None = nothing."""
        if self._is_raw:
            return Element(Record(Envelope(new_id(), lane, payload=element), now_ms, now_ms, NO_OP), None)
        try:
            found = decode_element(element, lane=lane)
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
        letters = [letter for letter in ended.values() if letter is not None]
        if letters:
            await self._put_back(letters)
        await self._run("drop", len(ended), *ended)

    async def _give_back_strays(self, just_taken: range) -> None:
        """Give back what the server says that this process holds, though it does not: a failover undid its end."""
        known = {*just_taken, *(taken.number for taken in self._taken.values())}
        try:
            numbers = [int(number) for number in await self._client.command("HKEYS", self._keys[2])]
        except Fault as fault:
            raise StoreUnavailableError(self._name, fault.reason) from fault
        await self._run("drop", 0, *(number for number in numbers if number not in known))

    # --- settling -----------------------------------------------------------------------------------------

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims: first what goes back to the store is there, then all leave the list."""
        found = [self._taken.get(_key(settlement)) for settlement in settlements]
        leaving: list[tuple[Again | Dead, _Taken]] = []
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
        over += await self._put_back_all(leaving)
        settled: set[int] = set()
        while over or back:
            letters = await self._run("drop", len(over), *over, *back)
            answered = list(zip(over + back, letters, strict=True))
            settled.update(number for number, letter in answered if letter == ord("s"))
            over, back = [], [number for number, letter in answered if letter == ord("m")]
        for settlement in settlements:
            self._taken.pop(_key(settlement), None)
        return [
            SettleOutcome.SETTLED if taken is not None and taken.number in settled else SettleOutcome.GONE
            for taken in found
        ]

    async def _put_back_all(self, pairs: Sequence[tuple[Again | Dead, _Taken]]) -> list[int]:
        """Put messages into the store; return the numbers of those that nobody else has taken since."""
        if not pairs:
            return []
        numbers = [taken.number for _, taken in pairs]
        letters = await self._run("keep", self._lease_ms, *numbers)
        kept = [pair for pair, letter in zip(pairs, letters, strict=True) if letter == ord("r")]
        if kept:
            await self._put_back([returned(taken.record, settlement) for settlement, taken in kept])
        return [taken.number for _, taken in kept]

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Prolong the lease on all that this process has taken."""
        found = [self._taken.get(_key(renewal)) for renewal in renewals]
        held = [each for each in found if each is not None]
        lease_ms = max(token_deadline_ms(renewal.to) for renewal in renewals) - self._now_ms()
        numbers = [f"a{each.number}" if each.record.alone else each.number for each in held]
        letters = await self._run("keep", lease_ms, *numbers) if held else b""
        kept = {each.number for each, letter in zip(held, letters, strict=True) if letter == ord("r")}
        outcomes: list[RenewOutcome] = []
        for renewal, each in zip(renewals, found, strict=True):
            if each is not None and each.number in kept:
                each.record = after_renewal(each.record)
                outcomes.append(RenewOutcome.RENEWED)
            else:
                self._taken.pop(_key(renewal), None)
                outcomes.append(RenewOutcome.LOST)
        return outcomes

    # --- waiting ------------------------------------------------------------------------------------------

    async def wait(self, *, until_ms: int | None) -> None:
        """Return when the list may have something: elements of its own, or of a consumer whose lease has ended."""
        if self._shall_listen:
            self.listener.ask()
        seconds = LONGEST_WAIT_S
        if until_ms is not None:
            seconds = min(seconds, (until_ms - self._now_ms()) / 1000)
        await self._wakeup.wait(seconds)

    def wake(self) -> None:
        """End the current or next `wait`."""
        self._wakeup.set()

    def clear(self) -> None:
        """Forget wake-ups so far."""
        self._wakeup.clear()
        self._shall_listen = False


def _key(asked: Settlement | Renewal) -> _Key:
    return asked.id, asked.revision, token_counter(asked.token)


def _unreadable(element: bytes, lane: Lane, now_ms: int, problem: str) -> PutBack:
    """Keep an element that is none of ours as a dead letter: under an id that is the same for the same bytes."""
    name = hashlib.sha256(element).hexdigest()[:32]
    log.warning("an element for %s cannot be read: %s; it is kept as dead letter %s", lane, problem, name)
    record = Record(Envelope(name, lane, payload=element), 0, now_ms, NO_OP, last_error=f"cannot be read: {problem}")
    return PutBack(record, now_ms, "undecodable")


def open_list_source(url: str) -> RedisListSource:
    """Open `redis-list://host:6379/0`; with TLS `rediss-list://`.

    Raises:
        ConfigurationError: The URL is not of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    given.finish()
    return RedisListSource(options)
