"""The Grafana board and the alert rules: a real run emits every metric that they name, as Prometheus reads it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from aiodelay import Conflict, Context, DuplicateIdError, Retry, Scheduler, Telemetry
from aiodelay.telemetry.names import METRICS
from tests.support.kafka import create_topic, new_name
from tests.support.servers import RedisServer, redis_products, start
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

FOLDER = Path(__file__).parents[2] / "docs" / "telemetry"
WORD = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
LANGUAGE = {"by", "sum", "max", "rate", "increase", "absent", "or", "le", "histogram_quantile", "label_values"}
LANGUAGE |= {"group", "last_over_time", "unless", "and", "on", "min_over_time", "max_over_time"}
RULE = re.compile(r"^ +- (alert|record): (\S+)\n(?: +#.*\n)* +expr: (?:\|\n((?: {10}.*\n)+)|(.*))", re.MULTILINE)


@dataclass
class Check:
    number: int


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = start(redis_products()[0].program, "--maxmemory", "200mb")
    yield server
    server.stop()


def expressions() -> list[str]:
    """Return what the board and the rules ask."""
    board = json.loads((FOLDER / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    return asked + alerts()


def alerts() -> list[str]:
    """Return what the alerts ask, with each recorded rule in the place of its name."""
    recorded: dict[str, str] = {}
    asked: list[str] = []
    for kind, name, block, line in RULE.findall((FOLDER / "alerts.yml").read_text()):
        expression = block or line
        for other in sorted(recorded, key=len, reverse=True):
            expression = expression.replace(other, recorded[other])
        if kind == "record":
            recorded[name] = expression
        else:
            asked.append(expression)
    return asked


def words(expression: str) -> set[str]:
    """Return the names of metrics and labels in an expression."""
    bare = re.sub(r"\"[^\"]*\"|\[[^\]]*\]|offset \w+", "", expression)
    return set(WORD.findall(bare)) - LANGUAGE


async def emit_all(redis: RedisServer, kafka: str, telemetry: Telemetry) -> dict[str, set[str]]:
    """Have all happen that is told of; return the names of series, each with its labels."""
    topic, runs = await create_topic(kafka, new_name()), list[int]()
    url = f"kafka://{kafka}/{new_name('schedules')}?create_topic=true&partitions=1"
    scheduler = Scheduler(redis.url, telemetry=telemetry, retry=Retry(attempts=2, first="1ms"))
    lost = asyncio.Event()

    @scheduler.handler
    async def check(event: Check, context: Context) -> None:
        runs.append(event.number)
        if event.number == 1:
            raise ValueError
        if event.number == 2:
            async with Redis.from_url(redis.url) as client:
                await client.flushall()  # with the lease
            lost.set()

    async with Scheduler(url, telemetry=telemetry) as on_kafka:
        await on_kafka.schedule(b"x", to=f"kafka:{topic}", delay="1ms")
        await on_kafka.run_until_idle()
        async with scheduler:
            await scheduler.schedule(b"x", to=f"redis-list:{new_name()}", delay="1ms")
            await scheduler.schedule(Check(1), delay="1ms")
            await scheduler.schedule(Check(3), delay="1h", id="a")
            with pytest.raises(DuplicateIdError):
                await scheduler.schedule(Check(3), delay="1h", id="a", conflict=Conflict.error())
            await scheduler.cancel("a")
            await scheduler.run_until_idle()
            await on_kafka._running._loops.housekeeping._step()  # type: ignore[union-attr]
            scheduler._running._options.observer._look_again_s = 0  # type: ignore[union-attr]
            await scheduler._running._loops.housekeeping._step()  # type: ignore[union-attr]
            await scheduler.schedule(Check(2), delay="1ms")
            await lost.wait()
            await until(
                lambda: "aiodelay_leases_lost_total{" in generate_latest(REGISTRY).decode(), "the lease is lost"
            )
            text = generate_latest(REGISTRY).decode()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_what_the_board_and_the_rules_name_is_emitted(redis: RedisServer, kafka: str) -> None:
    reader = PrometheusMetricReader()
    provider = MeterProvider([reader])
    try:
        emitted = await emit_all(redis, kafka, Telemetry(meter_provider=provider))
    finally:
        provider.shutdown()
    for expression in expressions():
        named = words(expression)
        metrics = {name for name in named if name in emitted}
        assert metrics, expression
        labels = {"aiodelay_store", "aiodelay_namespace"}.union(*(emitted[metric] for metric in metrics))
        assert named - metrics - labels == set(), expression
    for metric in METRICS:
        stem = metric.name.replace(".", "_")
        assert [name for name in emitted if name.startswith(stem)], metric.name


async def test_the_board_asks_for_every_metric_and_is_one_that_grafana_takes() -> None:
    asked = " ".join(expressions())
    assert [metric.name for metric in METRICS if metric.name.replace(".", "_") not in asked] == []
    board = json.loads((FOLDER / "grafana.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    spots = [tuple(panel["gridPos"][side] for side in "xy") for panel in board["panels"]]
    assert len(spots) == len(set(spots))
