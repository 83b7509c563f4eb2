"""Each benchmark that needs Spark works and verifies its results. Speed is not tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from benchmarks.__main__ import BENCHMARKS
from benchmarks.harness import Benchmark, Plan
from benchmarks.redis_server import running_server
from benchmarks.report import surroundings

SCALE = 0.002
SCALES = {"BD6": 0.02}
"""A tier of 20 days, of which only the files of one may be read."""
LARGE = {"BD6": 1.0}
"""A tenth of a tier of 20 million, at night."""
SIZES = [pytest.param(each, SCALES.get(each.id, SCALE), id=each.id) for each in BENCHMARKS if each.needs_spark] + [
    pytest.param(each, LARGE[each.id], id=f"{each.id}-large") for each in BENCHMARKS if each.id in LARGE
]


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_server(None) as url:
        yield url


@pytest.fixture
def _settings_kept(spark: SparkSession) -> Iterator[None]:
    """A benchmark sets what it likes in the session that is there."""
    name = "spark.sql.shuffle.partitions"
    before = f"{spark.conf.get(name)}"
    yield
    spark.conf.set(name, before)


@pytest.mark.nightly  # it proves the measuring, not aiodelay
@pytest.mark.usefixtures("_settings_kept")
@pytest.mark.parametrize(("benchmark", "scale"), SIZES)
def test_each_benchmark_works_and_finds_its_results_right(
    benchmark: Benchmark, scale: float, redis_url: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    kafka = request.getfixturevalue("kafka") if benchmark.needs_kafka else ""
    plan = Plan(tmp_path, runs=1, scale=scale, redis=redis_url, kafka=kafka)
    rows = benchmark.run(plan)
    assert {each.id for each in rows} == {benchmark.id}
    assert any(each.goal is not None for each in rows)
    assert all(len(each.values) == plan.runs for each in rows)
    assert SparkSession.getActiveSession() is not None, "the session of others stays"


def test_the_report_names_spark(tmp_path: Path) -> None:
    assert {"PySpark", "pyarrow"} <= set(surroundings(Plan(tmp_path, spark=True)))
