"""README: each Python block is a program that runs as it is shown, in a file and a folder of its own."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.command import Program, aiodelay

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
TIME = re.compile(r"\d:\d\d:\d\d(\.\d+)?")


def blocks() -> list[object]:
    """Return each block with the output that the README shows below it."""
    return [pytest.param(match[1], match[2], id=f"README.md:{line_of(match)}") for match in page_blocks()]


def page_blocks() -> list[re.Match[str]]:
    return list(BLOCK.finditer((ROOT / "README.md").read_text()))


def line_of(match: re.Match[str]) -> int:
    return match.string.count("\n", 0, match.start()) + 1


@pytest.mark.parametrize(("block", "shown"), blocks())
def test_a_block_runs_as_it_is_shown_also_a_second_time(tmp_path: Path, block: str, shown: str | None) -> None:
    (tmp_path / "shop.py").write_text(block)
    for _ in range(2):  # the second time on the store of the first
        with Program("shop.py", cwd=tmp_path) as program:
            assert program.exit_code() == 0, program.err.seen
            assert program.complaints() == []
            if shown is not None:
                assert [TIME.sub("", line) for line in program.out.seen] == TIME.sub("", shown).splitlines()


def test_the_first_program_is_also_one_that_the_command_runs(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(page_blocks()[0][1])
    with aiodelay("run", "shop:scheduler", cwd=tmp_path) as program:
        program.err.wait_for("shop:scheduler is dispatching")
        program.send(signal.SIGTERM)
        assert program.exit_code() == 0
        assert program.out.seen == []
