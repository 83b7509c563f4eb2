"""`python -m benchmarks [BF1 BP1 ...]`: measure, print the figures, and write the tables of docs/performance.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from . import (
    ba1_http_stream,
    ba2_http_calls,
    ba3_pages,
    ba4_viewers,
    ba5_help,
    ba6_tracing,
    ba7_http_latency,
    bd1_spark_backfill,
    bd2_spark_read,
    bd3_spark_report,
    bd4_spark_reconcile,
    bd5_spark_lateness,
    bd6_spark_promote,
    bd7_spark_engine,
    bd8_spark_simulate,
    bd9_spark_break_even,
    bf1_memory_dispatch,
    bf2_sqlite_schedule,
    bf3_sqlite_drain,
    bf4_lateness,
    bf5_idle,
    bf6_growth,
    bf7_checked_events,
    bf8_sqlite_kills,
    bf9_debounced,
    bf10_batches,
    bf11_sqlite_limits,
    bf12_storm,
    bk1_kafka_dispatch,
    bk2_redis_to_kafka,
    bk3_kafka_load,
    bk4_kafka_memory,
    bk5_kafka_lateness,
    bk6_kafka_kill,
    bk7_delay_box,
    bk8_kafka_source,
    bk9_kafka_refused,
    bk10_kafka_replaced,
    bp1_redis_dispatch,
    bp2_redis_transfer,
    bp3_redis_schedule,
    bp4_redis_lateness,
    bp5_redis_memory,
    bp6_redis_idle,
    bp7_redis_growth,
    bp8_redis_kills,
    bp9_redis_source,
    bp10_redis_calls,
    bp11_redis_limits,
    bp12_redis_cluster,
    bp13_redis_shards,
    br1_fan_out,
    br2_log,
    br3_on_next,
    br4_waiting,
)
from .harness import Benchmark, Plan, Row
from .kafka_server import running_broker
from .redis_server import running_server
from .report import as_json, as_line, as_markdown, by_family, put_between_markers, surroundings

BENCHMARKS: tuple[Benchmark, ...] = (
    ba1_http_stream.BENCHMARK,
    ba2_http_calls.BENCHMARK,
    ba3_pages.BENCHMARK,
    ba4_viewers.BENCHMARK,
    ba5_help.BENCHMARK,
    ba6_tracing.BENCHMARK,
    ba7_http_latency.BENCHMARK,
    bd1_spark_backfill.BENCHMARK,
    bd2_spark_read.BENCHMARK,
    bd3_spark_report.BENCHMARK,
    bd4_spark_reconcile.BENCHMARK,
    bd5_spark_lateness.BENCHMARK,
    bd6_spark_promote.BENCHMARK,
    bd7_spark_engine.BENCHMARK,
    bd8_spark_simulate.BENCHMARK,
    bd9_spark_break_even.BENCHMARK,
    bf1_memory_dispatch.BENCHMARK,
    bf2_sqlite_schedule.BENCHMARK,
    bf3_sqlite_drain.BENCHMARK,
    bf4_lateness.BENCHMARK,
    bf5_idle.BENCHMARK,
    bf6_growth.BENCHMARK,
    bf7_checked_events.BENCHMARK,
    bf8_sqlite_kills.BENCHMARK,
    bf9_debounced.BENCHMARK,
    bf10_batches.BENCHMARK,
    bf11_sqlite_limits.BENCHMARK,
    bf12_storm.BENCHMARK,
    bk1_kafka_dispatch.BENCHMARK,
    bk2_redis_to_kafka.BENCHMARK,
    bk3_kafka_load.BENCHMARK,
    bk4_kafka_memory.BENCHMARK,
    bk5_kafka_lateness.BENCHMARK,
    bk6_kafka_kill.BENCHMARK,
    bk7_delay_box.BENCHMARK,
    bk8_kafka_source.BENCHMARK,
    bk9_kafka_refused.BENCHMARK,
    bk10_kafka_replaced.BENCHMARK,
    bp1_redis_dispatch.BENCHMARK,
    bp2_redis_transfer.BENCHMARK,
    bp3_redis_schedule.BENCHMARK,
    bp4_redis_lateness.BENCHMARK,
    bp5_redis_memory.BENCHMARK,
    bp6_redis_idle.BENCHMARK,
    bp7_redis_growth.BENCHMARK,
    bp8_redis_kills.BENCHMARK,
    bp9_redis_source.BENCHMARK,
    bp10_redis_calls.BENCHMARK,
    bp11_redis_limits.BENCHMARK,
    bp12_redis_cluster.BENCHMARK,
    bp13_redis_shards.BENCHMARK,
    br1_fan_out.BENCHMARK,
    br2_log.BENCHMARK,
    br3_on_next.BENCHMARK,
    br4_waiting.BENCHMARK,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks; default: all. A missed goal is a finding, not a failure."""
    options = _parser().parse_args(arguments)
    by_id = {benchmark.id: benchmark for benchmark in BENCHMARKS}
    unknown = sorted(set(options.ids) - set(by_id))
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(by_id)}", file=sys.stderr)
        return 2
    chosen = [by_id[name] for name in options.ids or by_id]
    rows: list[Row] = []
    with ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="aiodelay-bench-", dir=options.directory)
        plan = Plan(
            Path(stack.enter_context(directory)),
            options.runs,
            options.scale,
            options.nightly,
            options.uvloop,
            stack.enter_context(running_server(options.redis)) if any(each.needs_redis for each in chosen) else "",
            stack.enter_context(running_broker(options.kafka)) if any(each.needs_kafka for each in chosen) else "",
            any(each.needs_spark for each in chosen),
        )
        around = surroundings(plan)
        print(", ".join(f"{name} {value}" for name, value in around.items()), flush=True)
        for benchmark in chosen:
            print(f"{benchmark.id}: {benchmark.title}, {plan.runs} rounds ...", flush=True)
            measured = benchmark.run(plan)
            print("\n".join(map(as_line, measured)), flush=True)
            rows += measured
    if options.json is not None:
        before = options.json.read_bytes() if options.json.exists() else b""
        options.json.write_bytes(as_json(before, rows, around))
    if options.markdown is not None:
        document = options.markdown.read_text(encoding="utf-8")
        for family, measured in by_family(rows).items():
            document = put_between_markers(document, family, as_markdown(measured, around))
        options.markdown.write_text(document, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("ids", nargs="*", metavar="BF1", help="ids of benchmarks (default: all)")
    parser.add_argument("--runs", type=int, default=5, help="number of rounds; a figure is their median (default: 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size, to try a benchmark out")
    parser.add_argument("--nightly", action="store_true", help="also run the parts that take long")
    parser.add_argument("--uvloop", action="store_true", help="run both sides on uvloop")
    parser.add_argument(
        "--redis", metavar="URL", help="a Redis or Valkey server with an empty database (default: start one)"
    )
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a Kafka broker (default: start one)")
    parser.add_argument("--directory", type=Path, help="folder for files (default: of the system, often /tmp)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures; keep those of other families")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write each family's table between its markers in this file"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
