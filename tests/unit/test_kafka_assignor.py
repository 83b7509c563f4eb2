"""The assignment of the partitions of a group to its members."""

from __future__ import annotations

import pytest
from aiokafka.cluster import ClusterMetadata
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.backends.kafka.client.assignor import ASSIGNOR, shared

MEMBERS = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


@given(MEMBERS, st.integers(0, 20))
def test_each_partition_has_one_owner_and_parts_differ_by_one_at_most(members: list[str], n: int) -> None:
    parts = shared("t", range(n), members)
    assert sorted(number for part in parts.values() for number in part) == list(range(n))
    assert parts.keys() == set(members)
    assert max(map(len, parts.values())) - min(map(len, parts.values())) <= 1


@given(st.permutations([f"m{i}" for i in range(5)]), st.permutations(list(range(12))))
def test_all_that_counts_is_who_the_members_are(members: list[str], numbers: list[int]) -> None:
    assert shared("t", numbers, members).keys() == set(members)
    in_order = shared("t", range(12), sorted(members))
    assert {member: sorted(part) for member, part in shared("t", numbers, members).items()} == {
        member: sorted(part) for member, part in in_order.items()
    }


@pytest.mark.parametrize("n", [2, 3, 8])
def test_few_partitions_move_when_a_member_comes(n: int) -> None:
    moved = 0
    for group in range(20):
        members = [f"{group}-{i}" for i in range(n)]
        before, after = shared("t", range(48), members), shared("t", range(48), [*members, f"{group}-new"])
        owner = {number: member for member, part in after.items() for number in part}
        moved += sum(owner[number] != member for member, part in before.items() for number in part)
    assert moved <= 20 * 48 / (n + 1) * 1.5  # as many have to move as the newcomer gets


def test_a_topic_is_shared_among_those_who_want_it() -> None:
    cluster = ClusterMetadata()
    cluster._partitions = {"a": dict.fromkeys(range(4)), "b": dict.fromkeys(range(2))}
    members = {"m1": ASSIGNOR.metadata(["a", "b"]), "m2": ASSIGNOR.metadata(["a"])}
    found = {member: dict(each.assignment) for member, each in ASSIGNOR.assign(cluster, members).items()}
    assert sorted(found["m1"]["a"] + found["m2"]["a"]) == [0, 1, 2, 3]
    assert (found["m1"]["b"], "b" in found["m2"]) == ([0, 1], False)
