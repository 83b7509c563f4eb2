"""docs/coming-from-*.md: our programs run on virtual time. At night, tests/integration runs the others, too."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from aiodelay import Scheduler
from aiodelay.testing import VirtualClock
from tests.support.coming_from import OURS, PAGES, PEERS, Shown


def test_each_page_has_a_program_of_both_sides_and_each_program_is_tested() -> None:
    assert [program.library for program in OURS] == [program.library for program in PEERS] == list(PAGES)
    blocks = re.findall(r"^```(?:python|js)$", "\n".join(PAGES.values()), re.MULTILINE)
    assert len(OURS + PEERS) == len(blocks)


@pytest.fixture(params=OURS, ids=lambda program: program.library)
def program(request: pytest.FixtureRequest) -> Shown:
    shown: Shown = request.param
    return shown


@pytest.fixture
def names(program: Shown) -> dict[str, Any]:
    """Run the program as a module, and return its names."""
    module: dict[str, Any] = {"__name__": "shop"}
    exec(compile(program.code, program.file, "exec", dont_inherit=True), module)
    return module


@pytest.fixture
def aiodelay_scheduler(names: dict[str, Any]) -> Scheduler:
    scheduler: Scheduler = names["scheduler"]
    return scheduler


@pytest.mark.asyncio
async def test_our_program_prints_the_lines_below_it(
    program: Shown,
    names: dict[str, Any],
    scheduler: Scheduler,
    clock: VirtualClock,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names["datetime"] = SimpleNamespace(now=lambda _: clock.now())
    async with scheduler:
        await names["place_orders"]()
        assert "order-8" not in [each.record.id async for each in scheduler.pending()]
        await clock.advance("1m30s")
    printed = capsys.readouterr().out.splitlines()
    assert list(dict.fromkeys(printed)) == program.lines
    assert printed.count("is order 7 paid?") == 1


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.library)
def test_the_program_of_another_library_is_complete(peer: Shown) -> None:
    assert any(peer.file.partition(".")[0] in command for command in peer.commands)
    if peer.file.endswith(".py"):
        compile(peer.code, peer.file, "exec", dont_inherit=True)
