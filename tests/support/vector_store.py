"""`play`: play vectors on a store, all cases of one shape at once, and report the differences from the rulebook."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.core import transitions as t
from aiodelay.core.values import (
    LEASE_MS,
    Again,
    Cancel,
    Claim,
    Dead,
    DeadKey,
    DeadLetter,
    Demand,
    Done,
    Fire,
    JournalEntry,
    Put,
    PutBack,
    Query,
    Renewal,
    RenewOutcome,
    Reschedule,
    Snapshot,
)
from aiodelay.ports import Store, Work
from aiodelay.testing.clock import VirtualClock
from tests.support.vector_rulebook import (
    LEAP_MS,
    PARKED,
    WORKER,
    Action,
    Claims,
    Leap,
    Purge,
    Seen,
    by_id,
    by_message,
    is_last,
)
from tests.support.vectors import Case

__all__ = ["Difference", "MakeStore", "play", "told"]

T = TypeVar("T")

MakeStore: TypeAlias = Callable[[VirtualClock], AbstractAsyncContextManager[Store]]
"""A function that opens an empty store."""

AT_ONCE = 1_000
COMMANDS, SETTLEMENTS = (Put, Cancel, Reschedule, Fire), (Done, Again, Dead)
LEAST_LAPSED = 60
"""The number of leases, and of claims on replaced versions, that one claim or step of housekeeping surely ends."""


@dataclass(frozen=True)
class Difference:
    """A difference between a store and the rulebook.

    Attributes:
        case: The case.
        step: The number of the step, from 1.
        what: `answer`, or the name of the part that was read after the step.
        expected: The value of the rulebook.
        found: The value of the store.
    """

    case: Case
    step: int
    what: str
    expected: object
    found: object

    def __str__(self) -> str:
        name = self.case.actions[self.step - 1].step
        parts = "".join(
            f"\n    {path}\n      rulebook: {expected!r}\n      store:    {found!r}"
            for path, expected, found in differing(self.expected, self.found, self.what)
        )
        return f"{self.case.id}: {self.case}\n  after step {self.step}, '{name}':{parts}"


def differing(expected: object, found: object, path: str) -> Iterator[tuple[str, object, object]]:
    """Yield the parts that differ: the path of each, its value in the rulebook, and its value in the store."""
    if expected == found:
        return
    if isinstance(expected, tuple) and isinstance(found, tuple) and len(expected) == len(found):
        for number, pair in enumerate(zip(expected, found, strict=True)):
            yield from differing(*pair, f"{path}[{number}]")
    elif isinstance(expected, tuple) and isinstance(found, tuple):
        yield path, [each for each in expected if each not in found], [each for each in found if each not in expected]
    elif isinstance(expected, Struct) and type(expected) is type(found):
        for name in expected.__struct_fields__:
            yield from differing(getattr(expected, name), getattr(found, name), f"{path}.{name}")
    else:
        yield path, expected, found


def told(differences: Sequence[Difference], most: int = 5) -> str:
    """Return a report of the differences, with the shortest cases."""
    shortest = sorted(differences, key=lambda each: each.step)[:most]
    return "\n".join([f"{len(differences)} cases differ; the shortest of them:", *map(str, shortest)])


async def play(
    make_store: MakeStore, cases: Sequence[Case], *, has_journal: bool = False, packs: bool = False
) -> list[Difference]:
    """Play cases, each shape in a separate store.

    Args:
        make_store: Opens an empty store. It is called once for each shape.
        cases: The cases, of any shapes.
        has_journal: Whether the cases and the stores keep journals, which are then compared.
        packs: Send consecutive commands of a case in one call, instead of one by one.

    Returns:
        The first difference of each case that has one.
    """
    differences: list[Difference] = []
    for alike in _alike(cases):
        clock = VirtualClock()
        async with make_store(clock) as store, store.work(WORKER, _lanes(alike)) as work:
            player = _Player(store, work, clock, alike, has_journal=has_journal, packs=packs)
            differences += await player.play()
    return differences


def _alike(cases: Iterable[Case]) -> Iterator[Sequence[Case]]:
    """Yield cases that can be played at once. Cases in which a claim must end lapsed leases come in small groups.

    Such a group is so small that one claim ends all of its leases.
    """
    by_shape: defaultdict[object, list[Case]] = defaultdict(list)
    for case in cases:
        by_shape[case.shape].append(case)
    for alike in by_shape.values():
        most = LEAST_LAPSED // 3 if alike[0].has_lapses else len(alike)
        for first in range(0, len(alike), most):
            yield alike[first : first + most]


def _lanes(cases: Iterable[Case]) -> list[str]:
    return sorted({lane for case in cases for lane in case.lanes})


@dataclass
class _Playing:
    """A case that is being played.

    Attributes:
        case: The case.
        done: The number of its steps that were carried out.
        tokens: The tokens of its claims, in the order of the claims.
    """

    case: Case
    done: int = 0
    tokens: list[int] = field(default_factory=list)

    def next(self, at: int, *, packs: bool) -> Iterator[tuple[int, Action]]:
        """Yield the step with this number, unless it was played; with `packs`, also the commands after a command."""
        actions = self.case.actions
        while self.done == at:
            yield at, actions[at]
            self.done = at = at + 1
            are_commands = [isinstance(action.asked, COMMANDS) for action in actions[at - 1 : at + 1]]
            if not packs or are_commands != [True, True]:
                return


Asked: TypeAlias = tuple[_Playing, int, Action]


class _Player:
    """Plays cases of one shape on one store.

    Args:
        store: The empty store.
        work: A worker for all lanes of the cases.
        clock: The clock of the store.
        cases: Cases of one shape.
        has_journal: Compare the journals, too.
        packs: Send consecutive commands of a case in one call.
    """

    def __init__(
        self,
        store: Store,
        work: Work,
        clock: VirtualClock,
        cases: Sequence[Case],
        *,
        has_journal: bool,
        packs: bool,
    ) -> None:
        self.store, self.work, self.clock, self.has_journal, self.packs = store, work, clock, has_journal, packs
        self.playing = {case.id: _Playing(case) for case in cases}
        self.lanes = _lanes(cases)
        self.requests = count(1)
        self.differences: list[Difference] = []

    async def play(self) -> list[Difference]:
        """Play the cases step by step, so that all end together. Return the differences."""
        await self._hold()
        for from_end in range(max(len(each.case.actions) for each in self.playing.values()), 0, -1):
            await self._step(from_end)
            if from_end == 1 or (from_end == 2 and not self.packs):
                await self._look(2 - from_end)
        return self.differences

    async def _hold(self) -> None:
        if any(playing.case.is_paused for playing in self.playing.values()):
            for lane in self.lanes:
                await self.store.pause(lane, PARKED)

    async def _step(self, from_end: int) -> None:
        """Carry out the step of each case at this distance from the end."""
        asked: defaultdict[object, list[Asked]] = defaultdict(list)
        for each in self.playing.values():
            for at, action in each.next(len(each.case.actions) - from_end, packs=self.packs):
                asked[self._kind(action)].append((each, at, action))
        for kind, group in asked.items():
            if kind is Leap:
                await self._leap(group)
            elif kind is Claims:
                await self._claim(group)
            else:
                for first in range(0, len(group), AT_ONCE):
                    await self._ask(kind, group[first : first + AT_ONCE])

    def _kind(self, action: Action) -> object:
        """Return the kind of a call. Calls of one kind are sent together. With `packs`, puts count as `commands`."""
        asked = action.asked
        if isinstance(asked, COMMANDS):
            return "puts" if isinstance(asked, Put) and not self.packs else "commands"
        return "settlements" if isinstance(asked, SETTLEMENTS) else type(asked)

    def _differs(self, playing: _Playing, at: int, what: str, expected: object, found: object) -> None:
        if self.playing.pop(playing.case.id, None) is not None:
            self.differences.append(Difference(playing.case, at + 1, what, expected, found))

    # --- steps --------------------------------------------------------------------------------------------

    async def _ask(self, kind: object, asked: Sequence[Asked]) -> None:
        """Send the calls to the store in one call, and compare the answers."""
        inputs: list[Any] = [self._with_token(*each) for each in asked]
        calls: dict[object, Callable[[Any], Awaitable[Any]]] = {
            "puts": self.store.apply,
            "commands": self.store.apply,
            "settlements": self.work.settle,
            Renewal: self.work.renew,
            DeadKey: self.store.redrive,
            PutBack: self.store.put_back,
        }
        if kind is Purge:
            await self.store.purge([each.key for each in inputs])
            return
        answers = await calls[kind](inputs)
        for (playing, at, action), put, answer in zip(asked, inputs, answers, strict=True):
            if isinstance(put, Renewal) and answer is not RenewOutcome.LOST and action.slot is not None:
                playing.tokens[action.slot] = put.to
            if answer != action.answer:
                self._differs(playing, at, "answer", action.answer, answer)

    def _with_token(self, playing: _Playing, at: int, action: Action) -> object:
        """Return the call with the token of the store instead of the rulebook's."""
        asked = action.asked
        if action.slot is None or not isinstance(asked, (*SETTLEMENTS, Renewal)):
            return asked
        own = playing.tokens[action.slot]
        if isinstance(asked, Renewal):
            to = t.token_for(t.token_deadline_ms(asked.to), t.token_counter(own))
            return replace(asked, token=own + action.off, to=to)
        return replace(asked, token=own + action.off)

    async def _claim(self, asked: Sequence[Asked]) -> None:
        """Claim all due messages in the lanes of these cases. Compare the messages of each case."""
        given: defaultdict[str, list[Claim]] = defaultdict(list)
        demand = {lane: Demand(AT_ONCE) for lane in _lanes(playing.case for playing, _, _ in asked)}
        while True:
            claimed = await self.work.claim(demand, request=f"{next(self.requests)}", lease_ms=LEASE_MS)
            for claim in claimed.claims:
                given[t.base_id(claim.record.id)].append(claim)
            if is_last(claimed):
                break
        for playing, at, action in asked:
            claims = sorted(given.pop(playing.case.id, []), key=by_id)
            playing.tokens += [claim.token for claim in claims]
            records = tuple(claim.record for claim in claims)
            if records != action.answer:
                self._differs(playing, at, "answer", action.answer, records)

    async def _leap(self, asked: Sequence[Asked]) -> None:
        self.clock.move(LEAP_MS)
        action = asked[0][2]
        if isinstance(action.asked, Leap) and action.asked.is_tidied:
            for _ in range(1 + len(self.playing) // LEAST_LAPSED):
                await self.work.tidy(self.lanes, limit=100_000)

    # --- reading ------------------------------------------------------------------------------------------

    async def _look(self, number: int) -> None:
        """Compare everything that can be read."""
        snapshots, letters, journal = await self._snapshots(), await self._letters(), await self._journal()
        for playing in list(self.playing.values()):
            case, message_id = playing.case, playing.case.id
            found = Seen(tuple(snapshots[message_id]), tuple(letters[message_id]), by_message(journal[message_id]))
            if found == case.seen[number]:
                continue
            for what in ("snapshots", "letters", "journal"):
                expected, read = getattr(case.seen[number], what), getattr(found, what)
                if expected != read:
                    self._differs(playing, len(case.actions) - 2 + number, what, expected, read)
                    break

    async def _snapshots(self) -> defaultdict[str, list[Snapshot]]:
        found: defaultdict[str, list[Snapshot]] = defaultdict(list)
        query = Query(limit=AT_ONCE)
        while page := await self.store.search(query):
            for each in page:
                found[t.base_id(each.record.id)].append(each)
            query = replace(query, after=(page[-1].next_attempt_ms, page[-1].record.id))
        return found

    async def _letters(self) -> defaultdict[str, list[DeadLetter]]:
        found: defaultdict[str, list[DeadLetter]] = defaultdict(list)
        after: tuple[int, str, int] | None = None
        while page := await self.store.dead_letters(after=after, limit=AT_ONCE):
            for each in page:
                found[t.base_id(each.record.id)].append(each)
            after = page[-1].at_ms, page[-1].record.id, page[-1].record.revision
        return found

    async def _journal(self) -> defaultdict[str, list[JournalEntry]]:
        found: defaultdict[str, list[JournalEntry]] = defaultdict(list)
        after = 0
        while self.has_journal and (page := await self.store.journal(after=after, limit=AT_ONCE)):
            for each in page:
                found[t.base_id(each.id)].append(each)
            after = page[-1].number
        return found
