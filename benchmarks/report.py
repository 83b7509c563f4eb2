"""Output of rows as text, JSON and Markdown, with the machine and the versions of the measurement."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import msgspec

import aiodelay
from tests.support import kafka

from .harness import CERTAIN_ROUNDS, Plan, Row, median_interval
from .redis_server import names_of_build

__all__ = ["as_json", "as_line", "as_markdown", "by_family", "put_between_markers", "surroundings"]


def surroundings(plan: Plan) -> dict[str, str]:
    """Return the machine and the versions on which the figures depend."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "aiodelay": aiodelay.__version__,
        "Python": platform.python_version(),
        "SQLite": sqlite3.sqlite_version,
        "msgspec": msgspec.__version__,
        **_redis(plan.redis),
        **_kafka(plan.kafka),
        **_spark(plan),
        "event loop": f"uvloop {metadata.version('uvloop')}" if plan.uvloop else "asyncio",
        "machine": f"{_cpu()}, {os.cpu_count()} cores",
        "system": f"{platform.system()} {platform.release()}",
        "load at the start": _load(),
        "rounds": str(plan.runs),
        "scale": f"{plan.scale:g}",
    }


def _redis(url: str) -> dict[str, str]:
    if not url:
        return {}
    return {
        "server": names_of_build(url),
        "redis-py": metadata.version("redis"),
        "hiredis": metadata.version("hiredis"),
    }


def _kafka(bootstrap: str) -> dict[str, str]:
    if not bootstrap:
        return {}
    return {"Kafka": kafka.choice(), "aiokafka": metadata.version("aiokafka")}


def _spark(plan: Plan) -> dict[str, str]:
    return {"PySpark": metadata.version("pyspark"), "pyarrow": metadata.version("pyarrow")} if plan.spark else {}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _load() -> str:
    """Return the load of the machine. Figures on a busy machine are less reliable."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def by_family(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows by family: the first two letters of an id. Each family has its own table."""
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row.id[:2], []).append(row)
    return families


def as_line(row: Row) -> str:
    """Return a row for the terminal."""
    low, high = row.spread
    verdict = {True: "met", False: "NOT MET", None: "shown"}[row.is_met]
    goal = "" if row.goal is None else f" (goal {row.goal})"
    return f"{row.id}  {row.what}: {row.median:.3g} [{low:.3g}-{high:.3g}] {row.unit}{goal} {verdict}; {row.beside}"


def as_json(before: bytes, rows: Sequence[Row], around: dict[str, str]) -> bytes:
    """Return all figures with the value of each round. Keep earlier figures of families that were not measured."""
    families = msgspec.json.decode(before) if before else {}
    for family, measured in by_family(rows).items():
        families[family] = {"surroundings": around, "results": _results(measured)}
    return msgspec.json.format(msgspec.json.encode(families), indent=2) + b"\n"


def _results(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [
        {
            "id": row.id,
            "what": row.what,
            "unit": row.unit,
            "median": row.median,
            "spread": row.spread,
            "values": row.values,
            "goal": None if row.goal is None else str(row.goal),
            "met": row.is_met,
            "beside": row.beside,
        }
        for row in rows
    ]


def as_markdown(rows: Sequence[Row], around: dict[str, str]) -> str:
    """Return the table for docs/performance.md."""
    lines = [
        "| id | measured | median [min-max] | unit | goal | met | medians of both sides, or a note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row.spread
        goal = "" if row.goal is None else f"{row.goal}"
        met = {True: "yes", False: "**no**", None: ""}[row.is_met]
        value = f"{row.median:.2f} [{low:.2f}-{high:.2f}]"
        if len(row.values) >= CERTAIN_ROUNDS:
            least, greatest = median_interval(row.values)
            value += f", 95 % {least:.2f}-{greatest:.2f}"
        lines.append(f"| {row.id} | {row.what} | {value} | {row.unit} | {goal} | {met} | {row.beside} |")
    return "\n".join(
        [*lines, "", "Conditions: " + ", ".join(f"{name} {value}" for name, value in around.items()) + "."]
    )


def put_between_markers(document: str, family: str, text: str) -> str:
    """Return the document with `text` between the markers of a family.

    Raises:
        ValueError: The document does not have both markers, once each and in order.
    """
    begin, end = f"<!-- {family}: begin -->", f"<!-- {family}: end -->"
    before, found_begin, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end or begin in rest or end in after:
        raise ValueError(f"the document must hold {begin!r} and then {end!r}, once each")
    return f"{before}{begin}\n{text}\n{end}{after}"
