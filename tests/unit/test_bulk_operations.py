"""Bulk operations of a service that ends: each ends after its current step; a slow one is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay.service.api import plans
from aiodelay.service.api.plans import Operation, Operations, Plan
from aiodelay.service.api.problems import ApiError

pytestmark = pytest.mark.asyncio

PLAN = Plan("cancel", "ann", "default")


async def test_what_is_under_way_ends_after_its_step() -> None:
    operations, began = Operations(), asyncio.Event()

    async def carry_out(operation: Operation) -> None:
        began.set()
        while not operation.is_stopping:  # noqa: ASYNC110 - an operation asks between its steps
            await asyncio.sleep(0)

    found = operations.start("token", PLAN, carry_out)
    await began.wait()
    assert operations.running(store="default") == [found]
    await operations.aclose()
    assert (found.state, found.error, operations.running(store="default")) == ("stopped", "", [])


async def test_what_takes_too_long_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CLOSE_S", 0.01)
    operations = Operations()
    found = operations.start("token", PLAN, lambda _: asyncio.Event().wait())
    await operations.aclose()
    assert (found.state, found.error) == ("failed", "the service ended")
    assert await found.wait(0)


async def test_the_latest_results_are_kept_and_only_a_few_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "KEPT", 3)
    operations = Operations()
    for n in range(5):
        assert await operations.start(f"t{n}", PLAN, lambda _: asyncio.sleep(0)).wait(10)
    assert [each.token for each in operations.all(store="default")] == ["t4", "t3", "t2", "t1"]
    with pytest.raises(ApiError, match="OperationNotFoundError"):
        operations.find("t0", store="default")
    monkeypatch.setattr(plans, "RUNNING", 0)
    with pytest.raises(ApiError, match="TooManyOperationsError"):
        operations.start("t5", PLAN, lambda _: asyncio.sleep(0))
