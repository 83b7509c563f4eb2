"""The capacity that a store needs for a workload: the answer of `aiodelay plan`.

The time and the memory of a message come from `costs.json`, which `python -m benchmarks.costs` writes from the figures
of docs/performance.md. The constants of this module are sizes that do not depend on the machine; tests measure them.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

__all__ = ["Cost", "Need", "StoreKind", "Workload", "costs", "needs"]

StoreKind: TypeAlias = Literal["redis", "valkey", "sqlite", "kafka"]
"""The kinds of stores that `aiodelay plan` knows."""

PAYLOAD_BYTES = 200
"""The payload of the benchmarks, in bytes. A payload of another size adds the difference."""
BUSY = 0.5
"""The part of a core that is planned for. A busier core makes messages late."""
REDIS_DEAD_BYTES, REDIS_JOURNAL_BYTES = 590, 90
"""Memory of a dead letter without its payload, and of an entry of the journal."""
REDIS_FILES = 3
"""Disk for each byte of memory: an append-only file doubles before Redis writes it again, beside the old file."""
SQLITE_BYTES, SQLITE_DEAD_BYTES, SQLITE_JOURNAL_BYTES = 190, 750, 140
"""Disk for a pending message and for a dead letter without payload, and for an entry of the journal."""
KAFKA_RECORD_BYTES, KAFKA_INDEX_BYTES, KAFKA_NEAR_BYTES = 220, 30, 400
"""A record without payload; a row of an index on disk; the memory of a message within the horizon, without payload."""
KAFKA_UNCLEANED = 1.5
"""Bytes of a topic for each byte that is pending: Kafka keeps old records for a day, and until 30 % are old."""
KAFKA_PARTITIONS = 3
"""Partitions for each process, as in the benchmarks. When a process dies, several processes share its partitions."""
READ_S = 600
"""A partition is small enough if a new owner reads it within this time."""
UNWRITTEN_S, LAG_S, DETECT_S = 2.0, 1.0, 2.0
"""A killed Redis server loses at most the commands of 2 s, because it writes its file late while an fsync is under way.

A replica is a second behind at most, as a guess. After an outage, a process tries again within 2 s.
"""


class Workload(Struct, frozen=True, kw_only=True):
    """The messages that a store will hold.

    Attributes:
        store: The kind of the store.
        pending: The messages that wait at the same time.
        per_s: The messages that are scheduled, and the messages that are delivered, in a second at the peak.
        payload: Bytes of a payload.
        dead: The dead letters that are kept.
        journal: The entries of the journal that are kept.
        server_memory: Bytes of data that one Redis server may hold.
        horizon_s: For Kafka, the option `horizon` in seconds.
        index_on_disk: For Kafka, whether the processes keep their index on disk.
    """

    store: StoreKind
    pending: int
    per_s: float
    payload: int = PAYLOAD_BYTES
    dead: int = 0
    journal: int = 0
    server_memory: int = 64 << 30
    horizon_s: float = 3600.0
    index_on_disk: bool = False


class Cost(Struct, frozen=True):
    """A measured cost, with its benchmark, the text of its row and its date."""

    value: float
    unit: str
    benchmark: str
    measured: str
    date: str


class Need(Struct, frozen=True):
    """One thing that a workload needs.

    Attributes:
        about: Its name.
        value: The amount; None if it was not measured.
        unit: The unit of the amount.
        text: The way to it, in words.
        costs: The names of the costs that it was computed from.
    """

    about: str
    value: float | None
    unit: str
    text: str
    costs: tuple[str, ...] = ()


@cache
def costs() -> dict[str, Cost]:
    """Return the measured costs, by name."""
    text = files("aiodelay.operations").joinpath("costs.json").read_bytes()
    return msgspec.json.decode(text, type=dict[str, Cost])


def needs(load: Workload) -> list[Need]:
    """Return what a workload needs: memory, disk, cores, parts, start time, and the cost of a failover."""
    if load.store == "kafka":
        return _kafka(load)
    return _sqlite(load) if load.store == "sqlite" else _redis(load)


def _redis(load: Workload) -> list[Need]:
    message = _value("redis_memory") + load.payload - PAYLOAD_BYTES
    memory = load.pending * message + load.dead * (REDIS_DEAD_BYTES + load.payload) + load.journal * REDIS_JOURNAL_BYTES
    cores, by_memory = _cores(load, "redis_put", "redis_run"), math.ceil(memory / load.server_memory)
    used: tuple[str, ...] = ("redis_put", "redis_run")
    work = "schedules one at a time, and deliveries"
    if cores > BUSY or by_memory > 1:
        cores *= _value("redis_nodes")
        used += ("redis_nodes",)
        work += f"; {_value('redis_nodes'):g} times the cost of one server"
    by_cores = math.ceil(cores / BUSY)
    shards = max(1, by_cores, by_memory)
    return [
        Need("memory", memory, "B", f"{message:.0f} B a pending message, of all servers together", ("redis_memory",)),
        Need("disk", memory * REDIS_FILES, "B", "at most: the append-only file, and a new one while it is written"),
        Need("server cores", cores, "cores", work, used),
        Need("shards", shards, "servers", f"{by_cores} for the cores, half of each busy; {by_memory} for the memory"),
        Need("start time", None, "s", "a process starts at once; the time in which the server loads its data: unknown"),
        Need(
            "failover time", DETECT_S, "s",
            "at most, after the new primary answers; the failover itself is not counted",
        ),
        Need(
            "late by a killed process", _value("redis_kill") / 1000, "s", "another process takes its messages over",
            ("redis_kill",),
        ),
        Need(
            "lost with durability=memory", math.ceil(load.per_s * UNWRITTEN_S), "commands",
            "at most, if the server is killed; at a failover, commands that the replica did not have yet",
        ),
        Need("lost with durability=replicated", 0, "commands", "at a failover, if the number is that of all replicas"),
        Need(
            "lost with durability=fsynced", 0, "commands",
            "if the same server starts again; at a failover, commands that the replica did not have yet",
        ),
        Need(
            "repeated by a failover", math.ceil(load.per_s * LAG_S), "messages",
            "deliveries whose settlement the new primary does not have, for a second of replication lag",
        ),
    ]  # fmt: skip


def _sqlite(load: Workload) -> list[Need]:
    disk = load.pending * (SQLITE_BYTES + load.payload) + load.dead * (SQLITE_DEAD_BYTES + load.payload)
    cores = _cores(load, "sqlite_put", "sqlite_run")
    return [
        Need("memory", 0, "B", "messages are on disk; a process needs no memory for a pending message"),
        Need("disk", disk + load.journal * SQLITE_JOURNAL_BYTES, "B", f"{SQLITE_BYTES + load.payload} B a message"),
        Need(
            "writer cores", cores, "cores", "one process writes at a time, so the rate is too high above 1",
            ("sqlite_put", "sqlite_run"),
        ),
        Need("shards", max(1, math.ceil(cores / BUSY)), "files", "half of each writer busy"),
        Need("start time", 0, "s", "a process reads no pending message when it starts"),
        Need("late by a killed process", _value("sqlite_kill") / 1000, "s", "another process runs", ("sqlite_kill",)),
        Need("lost", 0, "messages", "a schedule is acknowledged when it is on disk"),
    ]  # fmt: skip


def _kafka(load: Workload) -> list[Need]:
    near = min(load.pending, load.per_s * load.horizon_s)
    far = load.pending - near
    row = "kafka_memory_on_disk" if load.index_on_disk else "kafka_memory"
    record = KAFKA_RECORD_BYTES + load.payload
    memory = far * _value(row) + near * (KAFKA_NEAR_BYTES + load.payload)
    index = load.pending * KAFKA_INDEX_BYTES if load.index_on_disk else 0
    cores = _cores(load, "kafka_far", "kafka_move")
    processes = max(1, math.ceil(cores / BUSY))
    build_s = (far * _value("kafka_far") + near * _value("kafka_near")) / 1e6
    partitions = max(processes * KAFKA_PARTITIONS, math.ceil(build_s / READ_S))
    again_s = (far * _value("kafka_restart") + near * _value("kafka_near")) / 1e6
    first = Need(
        "first start", build_s / processes, "s", "each process reads its partitions", ("kafka_far", "kafka_near")
    )
    return [
        Need("memory", memory, "B", f"of all processes together, {near:,.0f} messages within the horizon", (row,)),
        Need("index on disk", index, "B", "of all processes together"),
        Need(
            "disk", (load.pending + load.dead) * record * KAFKA_UNCLEANED, "B",
            f"of the brokers, for each replica: {record} B a record, and records not cleaned yet",
        ),
        Need("cores", cores, "cores", "processes read the schedules and move messages", ("kafka_far", "kafka_move")),
        Need("processes", processes, "processes", "half of a core busy in each"),
        Need("partitions", partitions, "partitions", f"{KAFKA_PARTITIONS} a process; each is read in {READ_S} s"),
        first,
        Need(
            "start time", again_s / processes if load.index_on_disk else first.value, "s",
            "with the index of the last run" if load.index_on_disk else "as the first start",
            ("kafka_restart", "kafka_near") if load.index_on_disk else first.costs,
        ),
        Need(
            "late by a killed process", _value("kafka_kill") / 1000 + build_s / partitions, "s",
            "until the group notices, and each partition has a new owner that reads it", ("kafka_kill", *first.costs),
        ),
        Need("lost", 0, "messages", "if min.insync.replicas brokers or more have each record"),
    ]  # fmt: skip


def _value(name: str) -> float:
    return costs()[name].value


def _cores(load: Workload, *names: str) -> float:
    """Return the busy cores for a schedule and a delivery, `per_s` times a second. The costs are in µs."""
    return load.per_s * sum(_value(name) for name in names) / 1e6
