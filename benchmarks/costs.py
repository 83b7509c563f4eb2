"""Write the measured costs of a message, which `aiodelay plan` uses, from the figures of docs/performance.

`python -m benchmarks.costs` takes the figures from docs/performance.json and docs/performance.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["COSTS", "costs_of", "main"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COSTS = ROOT / "src" / "aiodelay" / "operations" / "costs.json"

FAR = "Kafka: memory of 1,000,000 messages pending beyond the horizon"


class Place(NamedTuple):
    """The place of a figure.

    Attributes:
        id: The benchmark.
        start: The beginning of the row's text.
        figure: A pattern whose group is the figure.
        unit: The unit of the cost.
        date: The date of the figure; "" = the date of its family's table.
    """

    id: str
    start: str
    figure: str
    unit: str
    date: str = ""


PLACES = {
    "redis_memory": Place("BP5", "Redis: memory of 1,000,000 pending", r"(\d+) B a message in all", "B a message"),
    "redis_put": Place("BP10", "A script makes the functions of a module", r"\| (\d+) µs \| yes", "µs of the server"),
    "redis_run": Place(
        "BP1",
        "Redis, asyncio: 20,000 messages due at once, to an empty handler of typed events, concurrency 16",
        r"([\d.]+) µs \(processor",
        "µs",
    ),
    "redis_nodes": Place(
        "BP13",
        "processor time of 4 nodes with 16 shards, of the time of one server",
        r"\| ([\d.]+) \[",
        "x the time of one server",
        date="2026-11-28",
    ),
    "redis_kill": Place("BP8", "Redis: 3 processes, one killed", r"\| ([\d.]+) \[.*\| ms", "ms"),
    "sqlite_put": Place("BF2", "SQLite: 20,000 concurrent calls", r"([\d.]+) µs a message", "µs"),
    "sqlite_run": Place(
        "BF3",
        "SQLite: 100,000 messages due at once, to an empty handler, concurrency 1,000, while",
        r"([\d.]+) µs \(processor",
        "µs",
    ),
    "sqlite_kill": Place(
        "BF8", "SQLite: 16 messages in flight in a process that is killed, an", r"\| ([\d.]+) \[", "ms"
    ),
    "kafka_far": Place(
        "BK3", "Kafka: start with 300,000 messages pending, due in 1 to 30", r"([\d.]+) µs a message", "µs"
    ),
    "kafka_near": Place(
        "BK3", "Kafka: start with 300,000 messages pending, due within", r"([\d.]+) µs a message", "µs"
    ),
    "kafka_move": Place("BK1", "Kafka -> Kafka, exactly once", r"([\d.]+) µs a message", "µs"),
    "kafka_memory": Place("BK4", f"{FAR}, index in memory", r"\| ([\d.]+) \[", "B a message"),
    "kafka_memory_on_disk": Place("BK4", f"{FAR}, index on disk, at the first", r"\| ([\d.]+) \[", "B a message"),
    "kafka_restart": Place(
        "BK4",
        "Kafka: restart with the index on disk, 1,000,000",
        r"ready after ([\d.]+) s",
        "µs a message in the index",
    ),
    "kafka_kill": Place("BK6", "Kafka: one of 2 processes killed", r"\| ([\d.]+) \[", "ms"),
}


def costs_of(performance: dict[str, Any], page: str) -> dict[str, dict[str, object]]:
    """Return the costs by name, each with its benchmark, the text and the date of its row.

    Args:
        performance: The content of docs/performance.json.
        page: The content of docs/performance.md, which also has the figures of single changes.

    Raises:
        LookupError: A figure is missing.
    """
    rows = [
        (row["id"], row["what"], f"| {row['median']:.2f} [{row['unit']}] | {row['unit']} | {row['beside']}", family)
        for family in performance.values()
        for row in family["results"]
    ]
    notes = re.findall(r"^\| (B\w\d+) \| (.*?)( \|.*)$", page, re.MULTILINE)
    family_of = {row[0][:2]: row[3] for row in rows}
    rows += [(benchmark, what, rest, family_of[benchmark[:2]]) for benchmark, what, rest in notes]
    found = {}
    for name, place in PLACES.items():
        for benchmark, what, text, family in rows:
            figure = re.search(place.figure, text)
            if benchmark == place.id and what.startswith(place.start) and figure:
                found[name] = {
                    "value": float(figure[1]),
                    "unit": place.unit,
                    "benchmark": benchmark,
                    "measured": what,
                    "date": place.date or family["surroundings"]["date"],
                }
                break
        else:
            raise LookupError(f"no figure for {name}: {place}")
    return found


def main() -> None:
    performance = json.loads((DOCS / "performance.json").read_text(encoding="utf-8"))
    costs = costs_of(performance, (DOCS / "performance.md").read_text(encoding="utf-8"))
    COSTS.write_text(json.dumps(costs, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
