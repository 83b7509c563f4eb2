"""Each benchmark that needs Kafka works and verifies its results. Speed is not tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import Benchmark, Plan
from benchmarks.redis_server import running_server
from benchmarks.report import surroundings


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_server(None) as url:
        yield url


ON_KAFKA = [pytest.param(each, id=each.id) for each in BENCHMARKS if each.needs_kafka and not each.needs_spark]


@pytest.mark.nightly  # it proves the measuring, not aiodelay
@pytest.mark.parametrize("benchmark", ON_KAFKA)
def test_each_benchmark_works_and_finds_its_results_right(
    benchmark: Benchmark, kafka: str, redis_url: str, tmp_path: Path
) -> None:
    plan = Plan(tmp_path, runs=1, scale=0.01, redis=redis_url, kafka=kafka)
    rows = benchmark.run(plan)
    assert {each.id for each in rows} == {benchmark.id}
    assert any(each.goal is not None for each in rows)
    assert all(len(each.values) == plan.runs for each in rows)


def test_the_report_names_the_broker(tmp_path: Path) -> None:
    around = surroundings(Plan(tmp_path, kafka="127.0.0.1:1"))
    assert {"Kafka", "aiokafka"} <= set(around)
