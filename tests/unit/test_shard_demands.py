"""`Demands`: which shards a claim asks, and how much of each lane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from aiodelay.backends.redis.sharded.demands import Demands
from aiodelay.core.values import MAX_CLAIM_MESSAGES, Claim, Demand, Envelope, Lane, Record

SHARDS = 16
A, B = "a", "b"
Stock = dict[Lane, Counter[int]]
"""The due messages of each lane in each shard."""


def claims_of(lane: Lane, number: int) -> list[Claim]:
    record = Record(Envelope("m", lane), 1, 1, bytes(8))
    return [Claim(record, 1)] * number


def claimed(
    demands: Demands, stock: Stock, has_more: Callable[[int], bool] = lambda _: False
) -> tuple[Counter[Lane], list[list[int]]]:
    """Make a claim on shards that have some stock. Return what it got of each lane, and the shards of each round."""
    got, rounds = Counter[Lane](), list[list[int]]()

    def is_due(_shard: int, _lanes: Sequence[Lane]) -> bool:
        return True

    def had_more(shard: int, _lanes: Sequence[Lane]) -> bool:
        return has_more(shard)

    while parts := demands.divided(is_due, had_more):
        rounds.append(sorted(parts))
        for shard, part in parts.items():
            claims: list[Claim] = []
            for lane, each in part.items():
                given = min(each.messages, stock[lane][shard])
                stock[lane][shard] -= given
                got[lane] += given
                claims += claims_of(lane, given)
            demands.took(shard, part, claims)
    return got, rounds


def spread(messages: int) -> Counter[int]:
    return Counter(dict.fromkeys(range(SHARDS), messages))


def demands(wanted: Mapping[Lane, int], *, turn: int = 0, first: int = 0) -> Demands:
    return Demands({lane: Demand(messages) for lane, messages in wanted.items()}, SHARDS, turn, first)


def test_l3_a_lane_of_one_shard_gets_its_equal_share_beside_a_lane_of_all() -> None:
    for first in range(SHARDS):
        for full in (range(SHARDS), range(0), [3], [2]):
            stock: Stock = {A: spread(1_000), B: Counter({2: 1_000})}
            of = demands({A: 1_000, B: 1_000}, first=first)
            got, rounds = claimed(of, stock, lambda shard: shard in full)  # noqa: B023
            assert got == {A: MAX_CLAIM_MESSAGES // 2, B: MAX_CLAIM_MESSAGES // 2}
            assert len(rounds) <= 5


def test_l3_a_lane_leaves_what_it_does_not_have_to_the_others() -> None:
    got, _ = claimed(demands({A: 1_000, B: 1_000}), {A: spread(1_000), B: Counter({2: 20})})
    assert got == {A: MAX_CLAIM_MESSAGES - 20, B: 20}


def test_l3_a_part_names_its_lanes_in_the_same_order_for_a_shard() -> None:
    """The work of a shard lets another lane begin in each call. Two changes of the order would undo each other."""
    orders = set()
    for turn in range(4):
        parts = demands({A: 100, B: 100}, turn=turn).divided(lambda *_: True, lambda *_: False)
        orders.add((tuple(parts[0]), tuple(parts[1])))
    assert orders == {((A, B), (B, A))}


def test_shards_that_surely_have_more_are_asked_one_by_one_in_turn() -> None:
    stock: Stock = {A: spread(100)}
    first, asked = 0, list[int]()
    for _ in range(SHARDS):
        of = demands({A: 64}, first=first)
        got, rounds = claimed(of, stock, lambda _: True)
        assert got[A] == 64
        asked += [shard for each in rounds for shard in each]
        first = of.next_shard
    assert sorted(asked) == list(range(SHARDS))


def test_shards_that_may_have_something_are_asked_at_once() -> None:
    got, rounds = claimed(demands({A: 64}), {A: Counter({7: 3, 9: 3})})
    assert (got[A], rounds) == (6, [list(range(SHARDS))])


def test_a_shard_that_may_have_something_is_visited_beside_shards_that_have_more() -> None:
    stock: Stock = {A: Counter({3: 10_000, 7: 1})}
    first, visited = 0, Counter[int]()
    for _ in range(SHARDS):
        of = demands({A: 64}, first=first)
        _, rounds = claimed(of, stock, lambda shard: shard == 3)
        assert len(rounds) <= 2
        visited.update(shard for each in rounds for shard in each)
        first = of.next_shard
    assert set(visited) == set(range(SHARDS))
    assert stock[A][7] == 0


def test_each_round_asks_more_shards_if_others_have_taken_what_was_there() -> None:
    got, rounds = claimed(demands({A: 64}), {A: Counter({14: 1})}, lambda _: True)
    assert (got[A], rounds) == (1, [[0], [1], [2, 3, 4, 5], list(range(6, SHARDS))])
