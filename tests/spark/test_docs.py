"""The Python blocks of the pages on Spark run, one after the other, on a store of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

PAGES = Path(__file__).parents[2] / "docs" / "spark"


@pytest.mark.parametrize("name", ["README.md", "backfill.md"])
def test_the_blocks_run(spark: SparkSession, tmp_path: Path, name: str) -> None:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", (PAGES / name).read_text(encoding="utf-8"), re.DOTALL)
    names = {"session": spark}
    for block in blocks:
        exec(compile(block.replace("sqlite:///delay.db", f"sqlite:///{tmp_path / 'delay.db'}"), name, "exec"), names)
    assert blocks
