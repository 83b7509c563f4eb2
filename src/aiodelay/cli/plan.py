"""`aiodelay plan`: computes the memory, disk, cores and start time that a store needs for a workload."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from aiodelay import ConfigurationError
from aiodelay.core.durations import parse_duration
from aiodelay.core.rates import parse_rate
from aiodelay.operations.capacity import Need, StoreKind, Workload, costs, needs

from .output import print_json, print_table

__all__ = ["plan"]

MOST_MESSAGES = 10**13
MOST_PAYLOAD = 1 << 20
_Count = Annotated[int, Parameter(validator=Number(gte=0, lte=MOST_MESSAGES))]


def plan(
    store: StoreKind,
    /,
    *,
    pending: _Count,
    rate: str,
    payload: Annotated[int, Parameter(validator=Number(gte=0, lte=MOST_PAYLOAD))] = 200,
    dead: _Count = 0,
    journal: _Count = 0,
    server_memory: Annotated[int, Parameter(validator=Number(gte=1, lte=1 << 20))] = 64,
    horizon: str = "1h",
    index: Literal["memory", "disk"] = "memory",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Compute the memory, disk, cores and start time that a store needs for a workload.

    The command opens no store. It multiplies costs that benchmarks have measured on one machine.

    Args:
        store: redis, valkey, sqlite or kafka.
        pending: The messages that wait at the same time.
        rate: The messages that are scheduled in a time at the peak, such as 5000/s. As many are delivered.
        payload: Bytes of a payload.
        dead: The dead letters that are kept.
        journal: The entries of the journal that are kept.
        server_memory: Data that one Redis or Valkey server may hold, in GiB.
        horizon: For Kafka, the store's option `horizon`.
        index: For Kafka, where the processes keep their index.
        json: Write JSON, one object per line.
    """
    number, span_ms = parse_rate(rate, field="rate")
    load = Workload(
        store=store,
        pending=pending,
        per_s=number * 1000 / span_ms,
        payload=payload,
        dead=dead,
        journal=journal,
        server_memory=server_memory << 30,
        horizon_s=parse_duration(horizon, field="horizon", error=ConfigurationError, least_ms=1) / 1000,
        index_on_disk=index == "disk",
    )
    found = needs(load)
    if json:
        print_json(*(_shape(each) for each in found))
        return
    print_table(("need", "amount"), [(each.about, _amount(each)) for each in found])
    print()
    for each in found:
        measured = ", ".join(dict.fromkeys(costs()[name].benchmark for name in each.costs))
        print(f"{each.about}: {each.text}{f' ({measured})' if measured else ''}")


def _shape(need: Need) -> dict[str, object]:
    used = [{"cost": name, **_fields(name)} for name in need.costs]
    return {"about": need.about, "value": need.value, "unit": need.unit, "text": need.text, "costs": used}


def _fields(name: str) -> dict[str, object]:
    cost = costs()[name]
    return {"value": cost.value, "unit": cost.unit, "benchmark": cost.benchmark, "date": cost.date}


def _amount(need: Need) -> str:
    if need.value is None:
        return "not measured"
    if need.unit == "B":
        return f"{need.value / 1e9:,.1f} GB"
    if need.unit in ("cores", "s"):
        return f"{need.value:,.1f} {need.unit}"
    return f"{need.value:,.0f} {need.unit}"
