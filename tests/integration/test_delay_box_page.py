"""docs/delay-box.md: its command and its blocks, in order, on a broker and a Redis server."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiodelay.backends.kafka.topics.requests import FIELDS
from aiodelay.testing.servers import redis_servers, serving
from tests.support.command import Program
from tests.support.kafka import create_topic

PAGE = (Path(__file__).parents[2] / "docs" / "delay-box.md").read_text()


@pytest.fixture
def redis_url() -> Iterator[str]:
    with serving(redis_servers()[0]) as url:
        yield url


@pytest.mark.asyncio
async def test_the_command_and_the_blocks_run_one_after_the_other(kafka: str, redis_url: str, tmp_path: Path) -> None:
    page = PAGE.replace("localhost:9092", kafka).replace("redis://localhost", redis_url)
    page = page.replace("flush(10)", "flush(60)")
    await create_topic(kafka, "orders")
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {"asyncio": asyncio}
    with Program("-m", *shlex.split(command), cwd=tmp_path) as box:
        await asyncio.to_thread(box.err.wait_for, "delaying from")
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL)):
            code = compile(block, f"block {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            coroutine = await asyncio.to_thread(eval, code, names)
            if inspect.iscoroutine(coroutine):
                await coroutine
        assert (names["moved"].stored, names["moved"].skipped) == (0, {})
        box.send(signal.SIGTERM)
        assert await asyncio.to_thread(box.exit_code) == 0


def test_every_field_stands_on_the_page() -> None:
    table = PAGE.partition("\n## Requests\n")[2].partition("\n\nThe request's own")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(FIELDS)
