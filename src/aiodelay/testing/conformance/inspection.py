"""`LookingRules`: rules for inspection: messages, counts, load, lanes, dead letters and the journal."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from aiodelay.core.ids import new_op
from aiodelay.core.transitions import KILLS_TO_DEATH, SUSPECT_LAPSES
from aiodelay.core.values import (
    After,
    Cancel,
    DeadKey,
    Fire,
    Instance,
    LaneCounts,
    LaneState,
    Late,
    LoadBucket,
    Query,
    Refused,
    Reschedule,
    State,
    Stored,
)
from aiodelay.errors import UnsupportedByStoreError

from .stage import HOUR_MS, LANE, LANES, OTHER, THIRD, Bench, Stage, again, dead, done, staged

__all__ = ["LookingRules"]

UNSERVED = "unserved"


class LookingRules(Bench):
    """The rules for the answers about messages, processes, dead letters and the journal, and for `tidy`'s report."""

    # --- messages -----------------------------------------------------------------------------------------

    @staged
    async def test_get_shows_a_message_as_it_stands(self, stage: Stage) -> None:
        put = stage.put(due=After(1000), headers={"é": b"\xff"})
        stored = await stage.stored(put)
        snapshot = await stage.get()
        assert snapshot is not None
        assert (snapshot.state, snapshot.next_attempt_ms) == (State.SCHEDULED, stage.now + 1000)
        record = snapshot.record
        assert (record.envelope, record.op, record.revision) == (put.envelope, put.op, stored.revision)
        states = []
        stage.move(1000)
        states.append(await stage.get())
        claim = await stage.claim_one()
        states.append(await stage.get())
        await stage.end(again(claim, stage.now + 1))
        states.append(await stage.get())
        seen = [each.state for each in states if each is not None]
        assert seen == [State.OVERDUE, State.IN_FLIGHT, State.SCHEDULED]
        assert await stage.get("unknown") is None

    @staged
    async def test_search_by_lane_and_time(self, stage: Stage) -> None:
        for number, lane in enumerate(LANES * 3):
            await stage.stored(stage.put(f"m{number}", After(number * 100), lane=lane))

        async def found(**query: object) -> list[str]:
            snapshots = await stage.store.search(Query(**query))  # type: ignore[arg-type]
            return [each.record.id for each in snapshots]

        assert await found() == [f"m{i}" for i in range(9)]
        assert await found(lanes=(LANE,)) == ["m0", "m3", "m6"]
        assert await found(lanes=(OTHER, THIRD), from_ms=stage.now + 100, to_ms=stage.now + 500) == ["m1", "m2", "m4"]
        assert await found(limit=2) == ["m0", "m1"]

    @staged
    async def test_search_pages_stay_stable_under_inserts(self, stage: Stage) -> None:
        originals = [f"m{i:02}" for i in range(20)]
        await stage.stored(*[stage.put(each, After(100 + i // 4)) for i, each in enumerate(originals)])
        seen: list[str] = []
        after = None
        while page := await stage.store.search(Query(limit=3, after=after)):
            seen += [each.record.id for each in page]
            after = (page[-1].next_attempt_ms, page[-1].record.id)
            await stage.stored(stage.put(f"before {len(seen)}", After(0)), stage.put(f"z {len(seen)}", After(104)))
            assert len(seen) < 100
        assert [each for each in seen if each.startswith("m")] == originals
        assert len(seen) == len(set(seen))

    @staged
    async def test_recurring_messages_are_found_by_an_index(self, stage: Stage) -> None:
        store = stage.store
        await stage.stored(*[stage.put(f"once-{n}") for n in range(3)])
        await stage.stored(*[stage.put(f"s{n}", rule={"e": HOUR_MS}) for n in range(7)])
        await stage.stored(stage.put("s5"))
        await stage.store.apply([Cancel(new_op(), "s6")])
        (claim,) = [each for each in await stage.claim(100) if each.record.id == "s1"]
        await stage.end(done(claim, stage.now + HOUR_MS))

        async def pages() -> list[str]:
            seen: list[str] = []
            while page := await store.series(after=seen[-1] if seen else None, limit=2):
                seen += [each.record.id for each in page]
            return seen

        assert await pages() == [f"s{n}" for n in range(5)]
        await stage.stored(stage.put("s5", rule={"e": HOUR_MS}))
        assert [each.record.id for each in await store.series()] == [f"s{n}" for n in range(6)]
        (first, *_) = await store.series(limit=1)
        assert first == await stage.get("s0")

    @staged
    async def test_counts_by_lane_and_state(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(each) for each in ("dead", "in flight", "overdue 1", "overdue 2")])
        claims = await stage.claim(2)
        await stage.end(dead(claims[0]))
        await stage.stored(stage.put("scheduled", After(1)), stage.put("held", lane=OTHER))
        await stage.stored(stage.put("alone", After(1), lane=UNSERVED))
        await stage.store.pause(OTHER)
        assert dict(await stage.store.counts()) == {
            LANE: LaneCounts(scheduled=1, overdue=2, in_flight=1, dead=1),
            OTHER: LaneCounts(held=1),
            UNSERVED: LaneCounts(scheduled=1, read_by_nobody=True),
        }

    @staged
    async def test_a_lane_is_read_by_nobody_once_its_last_worker_has_left(self, stage: Stage) -> None:
        await stage.stored(stage.put(lane=UNSERVED))

        async def is_unread() -> bool:
            return (await stage.store.counts())[UNSERVED].read_by_nobody

        async with stage.store.work("second", ()) as work:
            assert await is_unread()
            await work.tidy((UNSERVED,), limit=10)
            assert not await is_unread()
            await work.tidy((), limit=10)
            assert await is_unread()
            await work.tidy((UNSERVED,), limit=10)
        assert await is_unread()

    @staged
    async def test_instances_are_known_while_they_are_heard_of(self, stage: Stage) -> None:
        others = await stage.store.instances()
        async with stage.store.work("second", (OTHER,)) as work:
            await work.tidy((UNSERVED, OTHER), limit=10)
            found = await stage.store.instances()
            second = Instance("second", tuple(sorted((OTHER, UNSERVED))), stage.now, found[-1].parts)
            assert found == sorted([*others, second], key=lambda each: each.name)
            stage.move(HOUR_MS)
            assert await stage.store.instances() == []
            await work.tidy((OTHER,), limit=10)
            assert await stage.store.instances() == [Instance("second", (OTHER,), stage.now, second.parts)]
        assert await stage.store.instances() == []

    @staged
    async def test_load_ahead_by_bucket(self, stage: Stage) -> None:
        for number, due in enumerate([0, 999, 1000, 2500, 2999, 3000]):
            await stage.stored(stage.put(f"m{number}", After(due), lane=OTHER if due == 999 else LANE))
        await stage.claim()
        load = await stage.store.load(bucket_ms=1000, buckets=3)
        assert sorted(load, key=lambda each: (each.from_ms, each.lane)) == [
            LoadBucket(stage.now, OTHER, 1),
            LoadBucket(stage.now + 1000, LANE, 1),
            LoadBucket(stage.now + 2000, LANE, 2),
        ]

    @staged
    async def test_an_open_store_is_ready_and_has_a_name(self, stage: Stage) -> None:
        assert stage.work.status().phase == "ready"
        assert stage.store.name

    # --- lanes --------------------------------------------------------------------------------------------

    @staged
    async def test_tidy_reports_every_lane_that_holds_messages(self, stage: Stage) -> None:
        assert list((await stage.tidy()).lanes) == []
        await stage.stored(stage.put("a"), stage.put("ahead", After(HOUR_MS), lane=OTHER))
        await stage.stored(stage.put("flying", lane=THIRD), stage.put("alone", lane=UNSERVED))
        due_ms = stage.now
        await stage.claim_one(THIRD)
        stage.move(1000)
        tidied = await stage.tidy()
        assert tidied.now_ms == stage.now
        assert sorted(tidied.lanes, key=lambda each: each.lane) == sorted(
            [
                LaneState(LANE, due_ms, served=True),
                LaneState(OTHER, None, served=True),
                LaneState(THIRD, None, served=True),
                LaneState(UNSERVED, due_ms, served=False),
            ],
            key=lambda each: each.lane,
        )

    @pytest.mark.parametrize("address", [None, "held"], ids=["lane", "address"])
    @staged
    async def test_tidy_does_not_call_held_messages_overdue(self, stage: Stage, address: str | None) -> None:
        await stage.stored(stage.put("held", address="held"))
        await stage.store.pause(LANE, address)
        stage.move(1000)
        assert list((await stage.tidy()).lanes) == [LaneState(LANE, None, served=True)]
        if address is not None:
            await stage.stored(stage.put("free", address="free"))
            assert list((await stage.tidy()).lanes) == [LaneState(LANE, stage.now, served=True)]

    # --- dead letters -------------------------------------------------------------------------------------

    @staged
    async def test_dead_letters_are_listed_oldest_first_in_pages(self, stage: Stage) -> None:
        for number in range(6):
            await stage.stored(stage.put(f"m{number}", lane=LANES[number % 2]))
            await stage.end(dead(await stage.claim_one(LANES[number % 2]), "rejected", 2, "why"))
            stage.move(number % 3)
        letters = await stage.dead()
        order = [(each.at_ms, each.record.id, each.record.revision) for each in letters]
        assert (len(order), order) == (6, sorted(order))
        pages = [list(await stage.store.dead_letters(after=after, limit=2)) for after in (None, order[1], order[3])]
        assert [letter for page in pages for letter in page] == letters
        assert [each.record.id for each in await stage.store.dead_letters(lane=OTHER)] == ["m1", "m3", "m5"]
        assert {(each.reason, each.record.attempt, each.record.last_error) for each in letters} == {
            ("rejected", 2, "why")
        }

    @staged
    async def test_dead_letters_of_one_message_are_found_by_its_id(self, stage: Stage) -> None:
        ids = ["m", "n", "m", "m1", "mm", "m", "m\x7f345678"]
        for number, message_id in enumerate(ids):
            lane = LANES[number % 2]
            await stage.stored(stage.put(message_id, lane=lane))
            await stage.end(dead(await stage.claim_one(lane)))
            stage.move(number % 3)
        for message_id in {*ids, "unknown"}:
            letters = [each for each in await stage.dead() if each.record.id == message_id]
            assert list(await stage.store.dead_letters(message_id=message_id)) == letters
        first, second, third = await stage.store.dead_letters(message_id="m")
        place = first.at_ms, *first.key
        assert list(await stage.store.dead_letters(message_id="m", after=place, limit=1)) == [second]
        assert list(await stage.store.dead_letters(message_id="m", lane=OTHER)) == [third]
        await stage.store.purge([first.key])
        await stage.store.redrive([third.key])
        assert list(await stage.store.dead_letters(message_id="m")) == [second]

    @staged
    async def test_redrive_gives_a_new_life(self, stage: Stage) -> None:
        put = stage.put(late=Late.drop("1h"), payload=b"\xff")
        first = await stage.stored(put)
        await stage.end(again(await stage.claim_one(), stage.now, 1, "e"))
        await stage.end(dead(await stage.claim_one(), attempt=2, error="f"))
        stage.move(HOUR_MS)
        key = DeadKey("m", first.revision)
        (outcome,) = await stage.store.redrive([key])
        assert isinstance(outcome, Stored)
        assert (outcome.answer, outcome.revision > first.revision, outcome.due_ms) == ("stored", True, stage.now)
        assert list(await stage.store.redrive([key])) == [Refused("not_found")]
        record = (await stage.claim_one()).record
        assert (record.envelope, record.revision, record.due_ms) == (put.envelope, outcome.revision, stage.now)
        assert (record.attempt, record.first_error, record.last_error) == (0, None, None)
        assert record.expires_ms == stage.now + HOUR_MS

    @staged
    async def test_redrive_answers_each_key(self, stage: Stage) -> None:
        for message_id in ("a", "b"):
            await stage.stored(stage.put(message_id))
            await stage.end(dead(await stage.claim_one()))
        await stage.stored(stage.put("b", After(1)))
        keys = {letter.record.id: letter.key for letter in await stage.dead()}
        outcomes = await stage.store.redrive([keys["b"], DeadKey("a", 1), keys["a"]])
        assert list(outcomes[:2]) == [Refused("exists"), Refused("not_found")]
        assert isinstance(outcomes[2], Stored)
        assert [letter.key for letter in await stage.dead()] == [keys["b"]]

    @staged
    async def test_purge_deletes_for_good(self, stage: Stage) -> None:
        await stage.stored(*[stage.put(each) for each in ("a", "b", "c")])
        await stage.work.settle([dead(claim) for claim in await stage.claim()])
        keys = [letter.key for letter in await stage.dead()]
        assert await stage.store.purge([*keys[:2], DeadKey("a", 1)]) == 2
        assert await stage.store.purge(keys[:2]) == 0
        assert [letter.key for letter in await stage.dead()] == keys[2:]
        assert list(await stage.store.redrive(keys[:1])) == [Refused("not_found")]

    # --- journal ------------------------------------------------------------------------------------------

    @staged
    async def test_journal_is_off_until_asked_for(self, stage: Stage) -> None:
        with pytest.raises(UnsupportedByStoreError):
            await stage.store.journal()

    @staged
    async def test_journal_tells_every_event_in_order(self, stage: Stage) -> None:
        stage = await stage.with_journal(1000)
        steps: list[Callable[[], Awaitable[object]]] = [
            lambda: stage.do(stage.put(due=After(HOUR_MS))),
            lambda: stage.do(stage.put(due=After(HOUR_MS))),
            lambda: stage.do(Reschedule(stage.op(), "m", After(1000))),
            lambda: stage.do(Fire(stage.op(), "m")),
            stage.claim,
            stage.lapse,
        ]
        for step in steps:
            await step()
        await stage.end(again(await stage.claim_one(), stage.now, 1, "why"))
        await stage.end(dead(await stage.claim_one(), "rejected", 2))
        await stage.store.redrive([letter.key for letter in await stage.dead()])
        await stage.end(done(await stage.claim_one(), outcome="skipped"))
        events = "stored replaced rescheduled fired claimed lapsed claimed again claimed dead redriven claimed skipped"
        entries = await stage.store.journal()
        assert [entry.event for entry in entries] == events.split()
        numbers = [entry.number for entry in entries]
        assert numbers == sorted(set(numbers))
        if self.counted_journal:
            assert numbers[-1] - numbers[0] == len(numbers) - 1
        assert {(entry.id, entry.lane) for entry in entries} == {("m", LANE)}
        assert [entry.detail for entry in entries if entry.event in {"again", "dead"}] == ["why", "rejected"]
        assert [entry.attempt for entry in entries if entry.event in {"again", "dead"}] == [1, 2]
        assert entries[0].at_ms <= entries[-1].at_ms == stage.now

    @staged
    async def test_journal_tells_other_ends(self, stage: Stage) -> None:
        stage = await stage.with_journal(1000)
        await stage.stored(stage.put("cancelled"), stage.put("late", late=Late.drop("1s")), stage.put("done"))
        await stage.do(Cancel(stage.op(), "cancelled"))
        claims = {claim.record.id: claim for claim in await stage.claim()}
        await stage.end(done(claims["done"]))
        await stage.end(again(claims["late"], stage.now))
        stage.move(1001)
        await stage.tidy()
        await stage.stored(stage.put("killer"))
        for _ in range(SUSPECT_LAPSES + KILLS_TO_DEATH):
            await stage.die()
        last = {entry.id: (entry.event, entry.detail) for entry in await stage.store.journal(limit=1000)}
        assert {each: event for each, (event, _) in last.items()} == {
            "cancelled": "cancelled",
            "done": "delivered",
            "late": "dropped",
            "killer": "dead",
        }
        assert (last["late"][1], last["killer"][1]) == ("late", "killed_worker")

    @staged
    async def test_journal_can_be_read_by_message_and_in_pages(self, stage: Stage) -> None:
        stage = await stage.with_journal(1000)
        await stage.stored(*[stage.put(each, After(1)) for each in ("a", "b", "a", "b", "c")])
        entries = list(await stage.store.journal())
        assert [entry.id for entry in await stage.store.journal(message_id="b")] == ["b", "b"]
        assert list(await stage.store.journal(after=entries[1].number, limit=2)) == entries[2:4]

    @staged
    async def test_journal_is_trimmed_from_its_oldest_entry(self, stage: Stage) -> None:
        stage.needs_counted_journal()
        stage = await stage.with_journal(10)
        for number in range(100):
            await stage.stored(stage.put(f"m{number}", After(HOUR_MS)))
        await stage.tidy()
        entries = await stage.store.journal(limit=1000)
        assert [entry.id for entry in entries] == [f"m{number}" for number in range(90, 100)]
