"""The errors of a Redis server mean the same with each version of redis-py that aiodelay works with."""

from __future__ import annotations

import pytest
from redis import exceptions as e

from aiodelay.backends.redis.connection.faults import fault_of
from aiodelay.backends.redis.connection.locator import ClusterLocator
from aiodelay.backends.redis.connection.topology import Address, Topology

MOVED = "7638 10.0.0.2:7001"
SLOT = 7638


def in_each_version(code: str, kind: type[e.ResponseError], text: str) -> list[e.ResponseError]:
    """Return the error as redis-py before 6.0 reads it, as redis-py before 7.2 does, and as this version does."""
    without_code, this_version = kind(text), kind(text)
    without_code.__dict__.pop("status_code", None)
    this_version.status_code = code  # type: ignore[attr-defined,unused-ignore] # since 7.2
    return [e.ResponseError(f"{code} {text}"), without_code, this_version]


@pytest.mark.parametrize("version", range(3), ids=["before-6.0", "before-7.2", "newest"])
@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("ASK", e.AskError, MOVED),
        ("CLUSTERDOWN", e.ClusterDownError, "The cluster is down"),
        ("MASTERDOWN", e.MasterDownError, "Link with MASTER is down"),
        ("MOVED", e.MovedError, MOVED),
        ("READONLY", e.ReadOnlyError, "You can't write against a read only replica."),
        ("TRYAGAIN", e.TryAgainError, "Multiple keys request during rehashing of slot"),
    ],
)
def test_a_call_that_the_server_has_not_carried_out_may_be_sent_again(
    code: str, kind: type[e.ResponseError], text: str, version: int
) -> None:
    fault = fault_of(in_each_version(code, kind, text)[version], sent=True)
    assert (fault.kind, fault.is_moving, fault.reason) == ("unavailable", True, f"{code} {text}")
    assert fault.is_connection == (code in {"MASTERDOWN", "READONLY"}), "the host may now belong to another server"


def test_a_call_that_the_server_has_not_carried_out_is_refused() -> None:
    text = "Keys in request don't hash to the same slot"
    for error in in_each_version("CROSSSLOT", e.ClusterCrossSlotError, text):
        fault = fault_of(error, sent=True)
        assert (fault.kind, fault.is_moving, fault.reason) == ("unavailable", False, f"CROSSSLOT {text}")


@pytest.mark.asyncio
async def test_the_node_that_a_moved_error_names_is_asked_next() -> None:
    old, new = Address("10.0.0.1", 7001), Address("10.0.0.2", 7001)
    for error in in_each_version("MOVED", e.MovedError, MOVED):
        locator = ClusterLocator("redis+cluster://10.0.0.1:7001", Topology("cluster", (old,)), connect=lambda **_: None)
        locator._known[SLOT] = old
        locator.lost(SLOT, old, error)
        assert await locator.locate(SLOT) == new
