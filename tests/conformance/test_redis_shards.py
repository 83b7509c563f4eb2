"""The suites for stores on a namespace of four shards."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import ClassVar
from uuid import uuid4

import pytest

from aiodelay.backends.redis.records import shards
from aiodelay.ports import Store
from aiodelay.redis import RedisStore, open_store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import StoreConformance
from aiodelay.testing.conformance.commands import PositionRules
from aiodelay.testing.conformance.dispatching import DispatchRules
from aiodelay.testing.conformance.inspection import LookingRules
from aiodelay.testing.conformance.upgrading import UpgradeRules
from tests.support.servers import redis_products, redis_servers, serving
from tests.support.slow_stores import wait_long_for_wake_ups
from tests.support.topologies import clustered

ORDER = "the order is of each shard"
GROUPS = "suspects of different shards are tried apart"
LAST = "a claim takes suspects if no shard has other messages for it"
BYTES = "each shard that a claim asks may give a message that is larger than its part of the bytes"
UNASKED = "a shard that a claim does not ask counts as due at once"
VISITS = "a claim asks a shard without anything due only after the interval of the safety poll"
REPEATED = "a repeated claim returns the messages as they were"
DIVIDED = "the limit of a step of housekeeping is divided between the shards"

APART: Mapping[str, str] = {
    "test_demand_a_claim_is_bounded_whatever_is_asked_for": BYTES,
    "test_demand_one_larger_message_is_given_alone": ORDER,
    "test_demand_one_message_larger_than_any_claim_is_given_alone": BYTES,
    "test_held_messages_are_kept_and_come_back_in_order": ORDER,
    "test_l3_lanes_are_served_first_in_turn": BYTES,
    "test_l5_a_claim_takes_what_has_lapsed_no_more_often_than_it_asks_for": GROUPS,
    "test_l5_a_suspect_in_doubt_keeps_no_others_waiting": ORDER,
    "test_l5_an_error_text_that_is_no_utf8_stops_nobody": ORDER,
    "test_l5_half_of_a_group_that_ended_its_process_is_tried_next": GROUPS,
    "test_l5_kills_are_in_doubt_once_another_message_has_become_a_suspect": GROUPS,
    "test_l5_one_group_of_suspects_is_tried_at_a_time": GROUPS,
    "test_l5_the_other_half_of_a_group_holds_the_killer": GROUPS,
    "test_other_addresses_flow_past_a_held_one": ORDER,
}
"""The rules of one shard that several shards do not keep together. `TestInOneShard` shows that a shard keeps them."""
ALWAYS: Mapping[str, str] = {
    "test_a_repeated_claim_gives_what_is_still_leased": REPEATED,
    "test_demand_aliases_share_one_demand": UNASKED,
    "test_l1_tidy_is_bounded": DIVIDED,
    "test_l5_a_suspect_does_not_stop_other_workers": LAST,
    "test_l5_suspects_are_tried_together_and_without_others": LAST,
    "test_late_tidy_is_bounded": DIVIDED,
    "test_l1_a_lease_that_nobody_sets_right_after_the_clock_stepped_back_is_returned": VISITS,
    "test_l5_a_process_that_is_silent_for_four_leases_has_ended": VISITS,
}


@pytest.fixture(scope="module", params=redis_servers(), ids=lambda found: found.name)
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with serving(request.param) as url:
        yield url


@pytest.fixture(scope="module", params=redis_products(), ids=lambda found: found.name)
def cluster_url(request: pytest.FixtureRequest) -> Iterator[str]:
    with clustered(request.param.program, replicas=False) as cluster:
        yield cluster.url


class OnShards:
    wakes_other_processes: ClassVar[bool] = True
    order_per_group: ClassVar[bool] = False
    counted_journal: ClassVar[bool] = False
    not_kept: ClassVar[Mapping[str, str]] = {**APART, **ALWAYS}

    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wait_long_for_wake_ups(monkeypatch, RedisStore)

    @pytest.fixture(autouse=True)
    def _server(self, server_url: str, request: pytest.FixtureRequest) -> Iterator[None]:
        if request.function.__module__.endswith(".limiting"):
            pytest.skip("several shards keep no limits")
        if reason := self.not_kept.get(request.function.__name__):
            pytest.skip(reason)
        self.server_url, self.namespace = server_url, ""
        yield
        if self.namespace:
            asyncio.run(self._check_keys())

    async def _check_keys(self) -> None:
        async with open_store(self.server_url, namespace=self.namespace, clock=None) as store:
            assert await store.vanished() == ""
            assert len(store.shards) == 4, "the namespace has lost its shards"

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        self.namespace, self.journal = uuid4().hex, journal
        url = f"{self.server_url}?journal={journal}&shards=4&timeout_ms=60000"
        return open_store(url, namespace=self.namespace, clock=clock)

    def reopen(self, store: Store, clock: VirtualClock) -> Store:
        """Open the namespace without the number of its shards."""
        url = f"{self.server_url}?journal={self.journal}&timeout_ms=60000"
        return open_store(url, namespace=self.namespace, clock=clock)


class TestGate(OnShards, DispatchRules, LookingRules, PositionRules, UpgradeRules):
    """The rules whose answers the shards give together."""


@pytest.mark.nightly
class TestRedisShards(OnShards, StoreConformance):
    pass


@pytest.mark.nightly
class TestRedisShardsOnCluster(OnShards, StoreConformance):
    """The same with the shards on three nodes."""

    @pytest.fixture
    def server_url(self, cluster_url: str) -> str:  # type: ignore[override] # the fixture of the module, for this class
        return cluster_url


@pytest.mark.nightly
class TestInOneShard(OnShards, StoreConformance):
    """All ids in one of the four shards: each shard keeps the rules of order and of suspects."""

    order_per_group: ClassVar[bool] = True
    not_kept: ClassVar[Mapping[str, str]] = ALWAYS

    @pytest.fixture(autouse=True)
    def _one_shard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shards, "shard_of_member", lambda _member, _shards: 2)
