"""docs/kafka.md: its blocks, in order, on a broker, and its table of topic settings."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from aiodelay.backends.kafka.topics.topic import SETTINGS
from tests.support.kafka import create_topic

PAGE = (Path(__file__).parents[2] / "docs" / "kafka.md").read_text()
BLOCKS: list[str] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.asyncio
async def test_the_blocks_run_one_after_the_other(kafka: str) -> None:
    await create_topic(kafka, "videos")
    names: dict[str, Any] = {"asyncio": asyncio}
    for number, block in enumerate(BLOCKS):
        source = block.replace("localhost:9092", kafka).replace("flush(10)", "flush(60)")
        code = compile(source, f"block {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        coroutine = eval(code, names)
        if inspect.iscoroutine(coroutine):
            await coroutine


def test_every_setting_that_a_topic_is_made_with_stands_on_the_page() -> None:
    table = PAGE.partition("\n## The topic\n")[2].partition("\n## ")[0]
    assert {*SETTINGS, "min.insync.replicas"} <= set(re.findall(r"`([a-z.]+)`", table))
