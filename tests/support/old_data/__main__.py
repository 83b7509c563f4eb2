"""Write old data and the expected answers: `python -m tests.support.old_data FOLDER sqlite redis kafka archive`.

See tests/fixtures/README.md. Later versions read these files, so the program is run once for each version of a format.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from tests.support import kafka as brokers
from tests.support.cli import Cli
from tests.support.servers import redis_servers, serving

from .answers import CHAPTERS, answers
from .kafka import OldKafka
from .redis import OldRedis
from .sqlite import OldSqlite
from .story import JOURNAL

TOLD, EXPORT = "told.json", "export.jsonl"


def main(folder: Path, *formats: str) -> None:
    """Write the old data of these formats, each into a separate folder."""
    for each in formats:
        (folder / each).mkdir(parents=True, exist_ok=True)
        if each == "archive":
            _archive(folder)
        else:
            asyncio.run(_write(folder / each, each))
    if "sqlite" in formats:
        _export(folder)


async def _write(folder: Path, kind: str) -> None:
    async with _made(folder, kind) as old:
        told = await old.write()
        (folder / TOLD).write_bytes(msgspec.json.format(msgspec.json.encode(told)) + b"\n")
        for chapter in CHAPTERS:
            _save(folder / f"{chapter}.json", await answers(old, told, chapter))
        if isinstance(old, OldRedis):
            _save(folder / "ends.json", await old.ends(told))


@asynccontextmanager
async def _made(folder: Path, kind: str) -> AsyncIterator[Any]:
    """Start the servers of a store and yield its old data."""
    if kind == "sqlite":
        with TemporaryDirectory() as here:
            yield OldSqlite(folder, Path(here))
    elif kind == "redis":
        with serving(redis_servers()[0]) as url:
            yield OldRedis(folder, url)
    else:
        broker = await asyncio.to_thread(brokers.find)
        try:
            yield OldKafka(folder, broker.bootstrap)
        finally:
            await asyncio.to_thread(broker.stop)


def _save(path: Path, found: Mapping[str, Any]) -> None:
    """Write JSON with one item of an answer on each line."""
    texts = [f"{json.dumps(name, ensure_ascii=False)}: {_lines(answer)}" for name, answer in found.items()]
    path.write_text("{\n" + ",\n".join(texts) + "\n}\n", encoding="utf-8")


def _lines(answer: object) -> str:
    if not isinstance(answer, list):
        return json.dumps(answer, ensure_ascii=False)
    return "[\n" + ",\n".join(json.dumps(item, ensure_ascii=False) for item in answer) + "\n]"


def _export(folder: Path) -> None:
    """Export the SQLite file."""
    with TemporaryDirectory() as here:
        old = OldSqlite(folder / "sqlite", Path(here))
        asyncio.run(old.restore())
        (folder / "export").mkdir(exist_ok=True)
        ran = Cli(old.url, Path(here))("export", "--output", f"{folder / 'export' / EXPORT}")
        assert ran.code == 0, ran


def _archive(folder: Path) -> None:
    """Archive the events of the SQLite file."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - it needs Java

    from aiodelay.spark.jobs import report  # noqa: PLC0415 - as above

    from .archive import events_of, write  # noqa: PLC0415 - as above

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[1]").config("spark.sql.session.timeZone", "UTC")
    spark = builder.config("spark.ui.enabled", "false").config("spark.sql.shuffle.partitions", "1").getOrCreate()
    with TemporaryDirectory() as here:
        old = OldSqlite(folder / "sqlite", Path(here))
        asyncio.run(old.restore())
        to = Path(here, "events")
        write(spark, f"{old.url}?journal={JOURNAL}", to, folder / "archive" / "events")
        _save(folder / "archive" / "events.json", events_of(spark, to))
        _save(folder / "archive" / "report.json", {"rows": report.run(spark, archive=f"{to}").rows})
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
