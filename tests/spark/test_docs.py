"""The Python blocks of the Spark docs run in order, each page on a separate store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from aiodelay.testing.servers import redis_servers, serving

PAGES = Path(__file__).parents[2] / "docs" / "spark"


def run_blocks(spark: SparkSession, name: str, **places: str) -> dict[str, Any]:
    """Run a page's blocks with other places than those that they name; return the names that they have made."""
    blocks: list[str] = re.findall(r"```python\n(.*?)```", (PAGES / name).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {"spark": spark, "session": spark}
    for block in blocks:
        for scheme, place in places.items():
            block = re.sub(rf"{scheme}://[^\"']*", place, block)  # noqa: PLW2901 - the block, elsewhere
        exec(compile(block, name, "exec"), names)
    return names


@pytest.mark.parametrize("name", ["README.md", "backfill.md"])
def test_the_blocks_run(spark: SparkSession, tmp_path: Path, name: str) -> None:
    run_blocks(spark, name, sqlite=f"sqlite:///{tmp_path / 'delay.db'}")


def test_what_the_data_sources_page_writes_is_what_it_reads(spark: SparkSession) -> None:
    with serving(redis_servers()[0]) as url:
        names = run_blocks(spark, "data-source.md", redis=url)
        (written,) = names["messages"].collect()
        assert (written["id"], written["to"], written["state"]) == ("order-1", "redis-list:reminders", "scheduled")
        assert bytes(written["payload"]) == b"remind of order 1"
        assert names["overdue"].collect() == []
        assert names["times"].columns == ["id", "due_at"]
        assert names["times"].collect() == []  # of another namespace
