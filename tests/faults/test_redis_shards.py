"""F1, F2 on a namespace of four shards: clients killed at failure points. Histories are checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.scene import RedisScene
from tests.faults.test_kill import kill_and_inherit, storm
from tests.faults.test_redis_kill import BUSY
from tests.support.observed import FailurePoint
from tests.support.processes import Crew
from tests.support.servers import redis_programs, start

SHARDS = 4


class ShardedScene(RedisScene):
    """A server with a namespace of four shards."""

    def store_url(self) -> str:
        return self.url

    def leases(self) -> int:
        keys = self.server.command("KEYS", "{default:0?}:leased:*").split(b"\r\n")[2::2]
        return sum(int(self.server.command("ZCARD", key.decode())[1:]) for key in keys if key)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[RedisScene]:
    server = start(redis_programs()[0].program)
    with Crew(tmp_path) as crew:
        scene = ShardedScene(crew, tmp_path, server)
        scene.url = f"{server.url}?shards={SHARDS}"
        yield scene
    server.stop()


@pytest.mark.parametrize("point", [FailurePoint("claim", "after", 3), FailurePoint("settle", "after", 3)], ids=str)
def test_f1_f2_a_kill_loses_nothing_and_repeats_only_what_was_in_flight(scene: RedisScene, point: FailurePoint) -> None:
    kill_and_inherit(scene, point=point, serve=("work",), burst=BUSY, run_ms=20)
    assert b":4" in scene.server.command("EXISTS", *(f"{{default:0{n}}}:meta" for n in range(SHARDS)))


@pytest.mark.nightly
def test_f1_a_storm_of_kills(scene: RedisScene) -> None:
    storm(scene, 6, seed=1)
