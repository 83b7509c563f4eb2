"""`UpgradeRules`: rules for an older version on a store in which a newer version has switched a feature on."""

# ruff: noqa: D102 - the name of a test states its rule

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from aiodelay.core import features
from aiodelay.core.ids import new_op
from aiodelay.core.values import LEASE_MS, Cancel, RenewOutcome, SettleOutcome, Stored
from aiodelay.core.version import __version__
from aiodelay.errors import StoreTooNewError
from aiodelay.ports import Upgradable, Work

from .stage import Bench, Stage, done, staged

__all__ = ["UpgradeRules"]

NEW = "rehearsed"
"""The name of a feature that no version of aiodelay has."""


class UpgradeRules(Bench):
    """The rules for `Upgradable`. The tests play a version that knows the feature `NEW` only inside `_knowing()`."""

    @staged
    async def test_v1_a_version_that_does_not_know_a_feature_claims_nothing(self, stage: Stage) -> None:
        await stage.stored(stage.put("m"))
        await _switch_on(stage)
        with _refused():
            await stage.claim()
        _check_status(stage.work)

    @staged
    async def test_v1_a_version_that_does_not_know_a_feature_returns_no_lease(self, stage: Stage) -> None:
        await stage.stored(stage.put("m"))
        await stage.claim_one()
        await _switch_on(stage)
        stage.move(LEASE_MS)
        with _refused():
            await stage.tidy()
        _check_status(stage.work)

    @staged
    async def test_v1_a_version_that_does_not_know_a_feature_opens_no_dispatching_role(self, stage: Stage) -> None:
        await _switch_on(stage)
        with _refused():
            await stage.another_worker("second")

    @staged
    async def test_v1_a_version_that_does_not_know_a_feature_goes_on_with_commands(self, stage: Stage) -> None:
        await _switch_on(stage)
        for name in ("m", "cancelled"):
            await stage.stored(stage.put(name))
        assert isinstance(await stage.do(Cancel(new_op(), "cancelled")), Stored)
        with _knowing():
            await stage.reopen()
            assert await stage.ids() == ["m"]

    @staged
    async def test_v1_a_claim_from_before_the_switch_is_renewed_and_settled(self, stage: Stage) -> None:
        if not stage.bench.leases_survive:
            pytest.skip(f"{stage.store.name} gives a claim back when its process stops dispatching")
        await stage.stored(stage.put("m"))
        claim = await stage.claim_one()
        await _switch_on(stage)
        claim, outcome = await stage.renew(claim)
        assert outcome is RenewOutcome.RENEWED
        assert await stage.settle(done(claim)) is SettleOutcome.SETTLED
        assert await stage.get() is None

    @staged
    async def test_v1_a_version_that_knows_a_feature_goes_on(self, stage: Stage) -> None:
        with _knowing():
            await stage.stored(stage.put("m"))
            await _switch_on(stage)
            await stage.end(done(await stage.claim_one()))
            await stage.tidy()
            assert stage.work.status().phase == "ready"
            await stage.another_worker("second")

    @staged
    async def test_v1_what_is_switched_on_stays_on(self, stage: Stage) -> None:
        with _knowing():
            assert await _upgradable(stage).features() == {}
            await _switch_on(stage)
            await _switch_on(stage)
            assert await _upgradable(stage).features() == {NEW: __version__}
            await stage.reopen()
            assert await _upgradable(stage).features() == {NEW: __version__}


def _upgradable(stage: Stage) -> Upgradable:
    if not isinstance(stage.store, Upgradable):
        pytest.skip(f"{stage.store.name} records no features")
    return stage.store


async def _switch_on(stage: Stage) -> None:
    await _upgradable(stage).switch_on([NEW])


@contextmanager
def _knowing() -> Iterator[None]:
    """Play a version that knows the feature, during the block."""
    before, features.KNOWN = features.KNOWN, features.KNOWN | {NEW}
    try:
        yield
    finally:
        features.KNOWN = before


@contextmanager
def _refused() -> Iterator[None]:
    with pytest.raises(StoreTooNewError, match=NEW) as refused:
        yield
    assert f"aiodelay {__version__} does not know" in str(refused.value)


def _check_status(work: Work) -> None:
    status = work.status()
    assert status.phase == "ended"
    assert NEW in status.why
