"""Only tested versions of aiokafka are accepted: opening anything with another version is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from aiodelay.backends.kafka.client.versions import TESTED

ROOT = Path(__file__).parents[2]
UNTESTED = "99.1.2"
REFUSED = (
    f"version of aiokafka is {UNTESTED}, which aiodelay was not tested with; "
    f"allowed: {', '.join(TESTED)} (pip install 'aiodelay[kafka]')"
)
OPENING = """
import asyncio

from aiodelay import ConfigurationError, Scheduler
from aiodelay.kafka import KafkaSink, KafkaSource, KafkaStore

async def main():
    for make in (
        lambda: KafkaStore("kafka://127.0.0.1:1/schedules"),
        lambda: KafkaSink("127.0.0.1:1"),
        lambda: KafkaSource("127.0.0.1:1"),
        lambda: Scheduler("kafka://127.0.0.1:1/schedules"),
    ):
        try:
            async with make():
                print("opened")
        except ConfigurationError as error:
            print(error)

asyncio.run(main())
"""
WITHOUT_A_CLASS = """
from aiokafka.producer import sender

del sender.SendProduceReqHandler
"""
WITH_OTHER_CLASSES_INSIDE = """
from aiokafka import AIOKafkaConsumer

AIOKafkaConsumer.start = lambda self: None
"""
MAKING = """
from aiodelay import ConfigurationError, Scheduler

try:
    Scheduler("kafka://127.0.0.1:1/schedules")
except ConfigurationError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("program", "times"),
    [(OPENING, 4), (WITHOUT_A_CLASS + MAKING, 1), (WITH_OTHER_CLASSES_INSIDE + MAKING, 1)],
    ids=["same inside", "a class is missing", "a class is not used"],
)
def test_an_untested_version_is_refused_with_its_number_and_the_tested_ones(
    tmp_path: Path, program: str, times: int
) -> None:
    told = tmp_path / f"aiokafka-{UNTESTED}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: aiokafka\nVersion: {UNTESTED}\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.stdout.splitlines() == [REFUSED] * times, run.stderr


def test_a_tested_version_with_another_inside_says_what_it_lacks() -> None:
    program = f"{WITH_OTHER_CLASSES_INSIDE}\nimport aiodelay.kafka"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    last = run.stderr.splitlines()[-1]
    assert last == "ImportError: aiokafka's <lambda> does not use Fetcher, GroupCoordinator"


def test_pip_installs_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [*project["project"]["optional-dependencies"]["kafka"], *project["dependency-groups"]["test"]]
    required = [Requirement(line) for line in lines if isinstance(line, str) and line.startswith("aiokafka")]
    assert len(required) == 2
    for each in required:
        assert all(version in each.specifier for version in TESTED)
        assert "0.14.1" not in each.specifier
        assert "0.15.0" not in each.specifier
