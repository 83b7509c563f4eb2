"""Cleanup that runs to its end although its caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from aiodelay.core.completion import run_to_completion

pytestmark = pytest.mark.asyncio


async def test_it_returns_when_the_cleanup_has_ended() -> None:
    done: list[str] = []

    async def cleanup() -> None:
        await asyncio.sleep(0)
        done.append("cleanup")

    await run_to_completion(cleanup(), name="test")
    assert done == ["cleanup"]


async def test_a_caller_that_is_cancelled_again_and_again_waits_for_the_end() -> None:
    allowed, done, told = asyncio.Event(), list[str](), list[int]()

    async def cleanup() -> None:
        await allowed.wait()
        done.append("cleanup")

    caller = asyncio.ensure_future(run_to_completion(cleanup(), name="test", on_cancel=lambda: told.append(1)))
    for _ in range(3):
        await asyncio.sleep(0)
        caller.cancel()
    await asyncio.sleep(0)
    assert (done, caller.done()) == ([], False)
    allowed.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert (done, len(told)) == (["cleanup"], 3)


async def test_what_the_cleanup_raises_is_raised() -> None:
    async def cleanup() -> None:
        raise OSError("broken")

    with pytest.raises(ExceptionGroup) as caught:
        await run_to_completion(cleanup(), name="test")
    assert [str(each) for each in caught.value.exceptions] == ["broken"]
