"""aiodelay uses its own subclasses of aiokafka: aiokafka is unchanged for other code in the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kafka import create_topic, new_name

ROOT = Path(__file__).parents[2]


@pytest.mark.asyncio
async def test_using_a_cluster_leaves_aiokafkas_modules_classes_and_loggers_as_they_were(kafka: str) -> None:
    topic = await create_topic(kafka, new_name())
    arguments = ["-m", "tests.support.aiokafka_state", kafka, new_name("schedules"), topic]
    run = await asyncio.to_thread(
        subprocess.run, [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == []
