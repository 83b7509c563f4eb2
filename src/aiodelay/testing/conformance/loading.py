"""`LoadingRules`: rules for bulk loads. A store recognises a message that a load repeats only by its version."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aiodelay.core.ids import new_id, new_op
from aiodelay.core.values import (
    RETRY_WINDOW_MS,
    TOMBSTONE_WINDOW_MS,
    After,
    Cancel,
    Conflict,
    Late,
    Put,
    RenewOutcome,
    SettleOutcome,
    Stored,
)
from aiodelay.errors import InputError
from aiodelay.ports import BulkLoad

from .stage import HOUR_MS, Bench, Stage, again, dead, done, staged

__all__ = ["LoadingRules"]


class LoadingRules(Bench):
    """The rules for `BulkLoad`."""

    @staged
    async def test_s2_a_load_is_stored_and_its_repetition_is_known(self, stage: Stage) -> None:
        puts = [_put(stage, f"m{number}", 1) for number in range(700)]
        assert set(await _load(stage, puts)) == {"stored"}
        assert len(await stage.messages()) == 700
        stage.move(2 * RETRY_WINDOW_MS)
        before = await stage.picture()
        assert set(await _load(stage, puts)) == {"outdated"}
        assert await stage.picture() == before

    @staged
    async def test_s4_the_newest_version_stands(self, stage: Stage) -> None:
        assert await _load(stage, [_put(stage, "m", 5), _put(stage, "n", 5), _put(stage, "n", 7)]) == [
            "stored",
            "stored",
            "replaced",
        ]
        loads = [_put(stage, "m", 4), _put(stage, "m", 6), _put(stage, "n", 6), _put(stage, "new", 1)]
        assert await _load(stage, loads) == ["outdated", "replaced", "outdated", "stored"]
        assert {each.record.id: each.record.envelope.version for each in await stage.messages()} == {
            "m": 6,
            "n": 7,
            "new": 1,
        }

    @pytest.mark.parametrize("end", ["delivered", "cancelled", "dead", "late", "replaced, then delivered"])
    @staged
    async def test_s6_what_ended_does_not_come_back_with_a_load(self, stage: Stage, end: str) -> None:
        late = Late.drop("1s") if end == "late" else Late.deliver()
        await _load(stage, [_put(stage, "m", 5, late=late)])
        version = 5
        if end == "replaced, then delivered":
            version = 6
            assert await _load(stage, [_put(stage, "m", 6)]) == ["replaced"]
        if end == "cancelled":
            await stage.do(Cancel(stage.op(), "m"))
        elif end == "late":
            stage.move(HOUR_MS + 2000)
            await stage.tidy()
        else:
            stage.move(HOUR_MS)
            claim = await stage.claim_one()
            assert await stage.settle(dead(claim) if end == "dead" else done(claim)) is SettleOutcome.SETTLED
        stage.move(TOMBSTONE_WINDOW_MS - 2 * HOUR_MS)
        await stage.tidy()
        assert await _load(stage, [_put(stage, "m", version)]) == ["outdated"]
        assert await stage.messages() == []
        assert await _load(stage, [_put(stage, "m", version + 1)]) == ["stored"]

    @staged
    async def test_s4_a_load_replaces_what_is_in_flight_as_any_put_does(self, stage: Stage) -> None:
        await _load(stage, [_put(stage, "m", 1, due=After(0))])
        claim = await stage.claim_one()
        assert await _load(stage, [_put(stage, "m", 1), _put(stage, "m", 2)]) == ["outdated", "replaced"]
        assert await stage.settle(done(claim)) is SettleOutcome.SUPERSEDED
        assert (await stage.record()).envelope.version == 2

    @pytest.mark.parametrize("alive", ["in flight", "replaced in flight", "retried", "replaced while retried"])
    @staged
    async def test_s5_a_load_tells_of_an_older_version_in_flight(self, stage: Stage, alive: str) -> None:
        """A retry of an occurrence also counts as an older version of its series."""
        stage.needs_verdict()
        rule = {"e": HOUR_MS} if alive.endswith("retried") else None
        await _load(stage, [stage.put("m", conflict=Conflict.newer(1), rule=rule)])
        claim = await stage.claim_one()
        if rule is not None:
            await stage.end(again(claim, stage.now, then=stage.now + HOUR_MS))
            claim = await stage.claim_one()
        if alive.startswith("replaced"):
            assert (await _loaded(stage, _put(stage, "m", 2))).is_older_in_flight
        assert (await _loaded(stage, _put(stage, "m", 3))).is_older_in_flight
        assert (await _loaded(stage, _put(stage, "m", 4))).is_older_in_flight
        assert (await stage.renew(claim))[1] is RenewOutcome.SUPERSEDED
        cancelled = await stage.do(Cancel(stage.op(), "m"))
        assert isinstance(cancelled, Stored)
        assert cancelled.answer == "in_flight"
        assert (await _load(stage, [_put(stage, "m", 4)]), await stage.get()) == (["outdated"], None)
        await _loaded(stage, _put(stage, "m", 5))
        await stage.lapse()
        assert not (await _loaded(stage, _put(stage, "m", 6))).is_older_in_flight
        assert (await stage.record()).lapses == 0

    @staged
    async def test_s4_a_load_is_not_mistaken_for_what_no_command_wrote(self, stage: Stage) -> None:
        await _load(stage, [_put(stage, "m", 1, due=After(0))])
        await stage.end(dead(await stage.claim_one()))
        (letter,) = await stage.dead()
        assert isinstance((await stage.store.redrive([letter.key]))[0], Stored)
        assert await _load(stage, [_put(stage, "m", 1), _put(stage, "m", 2)]) == ["outdated", "replaced"]

    @staged
    async def test_s2_ids_as_the_scheduler_makes_them_are_loaded_while_commands_are_remembered(
        self, stage: Stage
    ) -> None:
        await stage.store.apply([stage.put("m"), Cancel(new_op(), "m")])
        puts = [_put(stage, new_id(), 1) for _ in range(2)]
        assert await _load(stage, puts) == ["stored", "stored"]
        assert await _load(stage, puts) == ["outdated", "outdated"]

    @staged
    async def test_a_load_of_anything_else_is_refused_whole(self, stage: Stage) -> None:
        good = _put(stage, "good", 1)
        for bad in (stage.put("bad"), stage.put("bad", conflict=Conflict.keep())):
            with pytest.raises(InputError, match=r"Conflict\.newer"):
                await _load(stage, [good, bad])
        assert await stage.messages() == []

    @staged
    async def test_s2_a_load_survives_reopening(self, stage: Stage) -> None:
        puts = [_put(stage, f"m{number}", 1) for number in range(3)]
        await _load(stage, puts)
        await stage.reopen()
        assert len(await stage.messages()) == 3
        assert set(await _load(stage, puts)) == {"outdated"}


def _put(stage: Stage, message_id: str, version: int, *, due: After | None = None, late: Late | None = None) -> Put:
    return stage.put(message_id, due or After(HOUR_MS), conflict=Conflict.newer(version), late=late or Late.deliver())


async def _loaded(stage: Stage, put: Put) -> Stored:
    assert isinstance(stage.store, BulkLoad)
    (outcome,) = await stage.store.bulk_load([put])
    assert isinstance(outcome, Stored)
    return outcome


async def _load(stage: Stage, puts: Sequence[Put]) -> list[str]:
    if not isinstance(stage.store, BulkLoad):
        pytest.skip("the store loads nothing in bulk")
    outcomes = await stage.store.bulk_load(puts)
    assert len(outcomes) == len(puts)
    return [each.answer if isinstance(each, Stored) else getattr(each, "reason", "unknown") for each in outcomes]
