"""examples/custom_backend, installed as a package: its tests pass, and programs use it by URL."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.support.command import PYTEST, Program
from tests.support.disks import IN_MEMORY

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_backend"
PAGE = Path(__file__).parents[2] / "docs" / "custom-backends.md"
PATIENCE_S = 120.0
PROGRAM = """
import asyncio
import sys

from aiodelay import Scheduler


async def main() -> None:
    async with Scheduler("log:///state", sinks=["stdout:"]) as scheduler:
        if sys.argv[1:]:
            await scheduler.schedule(b"from the log", to="stdout:x", delay="0s", id="a")
        await scheduler.run_until_idle()


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the example was built and installed: by pip, from its source, without a network."""
    folder = tmp_path_factory.mktemp("installed")
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--root-user-action=ignore"]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(folder / "packages")]
    with Program(*pip, *options, str(source), cwd=folder) as program:
        assert program.exit_code() == 0, program.err.seen
    return folder


def run(installed: Path, *arguments: str, cwd: Path) -> list[str]:
    with Program(*arguments, cwd=cwd, environment={"PYTHONPATH": str(installed / "packages")}) as program:
        assert program.exit_code(PATIENCE_S) == 0, [*program.out.seen, *program.err.seen]
        return program.out.seen


def test_its_own_tests_pass(installed: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="aiodelay-", dir=IN_MEMORY) as folder:
        pytest_run = [*PYTEST, "-q", "-p", "no:randomly", f"--basetemp={folder}/tests", "tests"]
        said = run(installed, *pytest_run, cwd=installed / "source")
    found = re.search(r"(\d+) passed", said[-1])
    assert found is not None, said
    assert int(found[1]) > 300, "the conformance suite ran"


def test_it_is_used_by_url(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "program.py").write_text(PROGRAM)
    (line,) = run(installed, "program.py", "schedule", cwd=tmp_path)
    assert '"payload":"from the log"' in line
    assert run(installed, "program.py", cwd=tmp_path) == [], "delivered, and not again"


def test_the_page_shows_what_the_example_holds() -> None:
    """Each block of docs/custom-backends.md that names a file is part of it, word by word."""
    blocks = re.findall(r"^```(?:python|toml) title=\"(.*?)\"\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    for name, block in blocks:
        text = (EXAMPLE / name).read_text()
        for part in block.split("    ...\n"):
            assert part.strip("\n") in text, f"{name} has changed"
