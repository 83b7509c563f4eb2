"""A topic as a source while its readers are killed and stopped, and its broker goes away."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import closing
from itertools import product
from pathlib import Path

import pytest

from tests.faults.programs.topic_reader import CONCURRENCY, Plan, fails_once
from tests.support.kafka import Broker, create_topic, new_name
from tests.support.processes import Crew, Worker
from tests.support.topics import Group, producing
from tests.support.waiting import until_sync

PARTITIONS = 3


class Scene:
    """A topic, a group, a store, and the runs that have ended well."""

    def __init__(self, bootstrap: str, folder: Path, crew: Crew, store: str = "") -> None:
        self._store = store or f"sqlite:///{folder / 'store.db'}"
        self.bootstrap, self._folder, self._crew = bootstrap, folder, crew
        self.group = new_name("group")
        self._seen = Group(bootstrap, self.group)
        self.topic = asyncio.run(create_topic(bootstrap, new_name(), PARTITIONS))
        self._files: list[Path] = []

    def close(self) -> None:
        self._seen.close()

    def fill(self, n: int, *, first: int = 0) -> None:
        with producing(self.bootstrap) as producer:
            for number, i in product(range(PARTITIONS), range(first, first + n)):
                producer.produce(self.topic, b"%d %d" % (number, i), partition=number)

    def reader(self, *, pulls: bool = False) -> Worker:
        runs = self._folder / f"runs-{len(self._files)}"
        self._files.append(runs)
        source = f"kafka:{self.topic}?group={self.group}"
        worker = self._crew.start(
            "topic_reader",
            Plan(kafka=self.bootstrap, source=source, store=self._store, runs=f"{runs}", pulls=pulls),
            name=f"reader {len(self._files)}",
        )
        worker.line("ready")
        return worker

    def runs(self) -> Counter[tuple[int, int, int]]:
        """Return the runs that ended well: partition, number, attempt."""
        lines = [line for file in self._files if file.exists() for line in file.read_bytes().splitlines()]
        return Counter(tuple(map(int, line.split())) for line in lines)  # type: ignore[misc]

    def committed(self) -> list[int]:
        return [max(offset, 0) for offset in self._seen.committed(self.topic, PARTITIONS)]

    def wait_for_some(self, n: int) -> None:
        """Wait until so many further records, of all partitions, are committed."""
        before = sum(self.committed())
        until_sync(lambda: sum(self.committed()) >= before + n, f"{n} further records are committed", 60)

    def wait_for(self, n: int) -> None:
        """Wait until so many records of each partition have been handled, and so far is committed."""
        until_sync(lambda: self.committed() == [n] * PARTITIONS, f"{n} of each partition are committed", 60)
        until_sync(lambda: len({run[:2] for run in self.runs()}) == n * PARTITIONS, f"{n} of each have been handled")

    def lost(self) -> list[tuple[int, int]]:
        """Return what lies below the committed offsets, was not handled, and waits for no retry."""
        offsets = self.committed()
        handled = {run[:2] for run in self.runs()}
        return [
            (number, i)
            for number in range(PARTITIONS)
            for i in range(offsets[number])
            if (number, i) not in handled and not fails_once(i)
        ]


@pytest.mark.parametrize("pulls", [False, True])
def test_s2_b1_offsets_pass_nothing_that_has_not_ended_when_a_reader_is_killed(
    own_broker: Broker, tmp_path: Path, pulls: bool
) -> None:
    chance, n, twice_at_most = random.Random(1), 400, 0
    with Crew(tmp_path) as crew, closing(Scene(own_broker.bootstrap, tmp_path, crew)) as scene:
        scene.fill(n)
        kills = 0
        while kills < 3:
            reader = scene.reader(pulls=pulls)
            scene.wait_for_some(60)
            time.sleep(chance.uniform(0, 0.1))  # it is killed at any moment between two commits
            reader.kill()
            assert scene.lost() == []
            offsets = scene.committed()
            kills += all(offset < n for offset in offsets)  # else this process stood still, and the reader was idle
            if max(offsets) > n - 200:
                scene.fill(400, first=n)
                n += 400
            runs = scene.runs()
            twice_at_most += sum(i >= offsets[number] for number, i, _ in runs) + CONCURRENCY
            for number, offset in enumerate(offsets):  # what failed may have been put back, and is read again as well
                read = range(offset, max((i for place, i, _ in runs if place == number), default=0) + CONCURRENCY)
                twice_at_most += sum(fails_once(i) and (number, i, 2) not in runs for i in read)
        scene.reader(pulls=pulls)
        scene.wait_for(n)
        runs = scene.runs()
        repeated = sum(runs.values()) - len({run[:2] for run in runs})
        assert repeated <= twice_at_most, (repeated, twice_at_most)


def test_s7_one_that_was_stopped_and_wakes_moves_no_offset_back(own_broker: Broker, tmp_path: Path) -> None:
    n = 250
    # Not in a file: whoever is stopped may hold its lock.
    store = f"kafka://{own_broker.bootstrap}/{new_name('schedules')}?create_topic=true&partitions=2"
    with Crew(tmp_path) as crew, closing(Scene(own_broker.bootstrap, tmp_path, crew, store)) as scene:
        scene.fill(n)
        stopped = scene.reader()
        scene.wait_for_some(60)
        stopped.stop()
        scene.reader()
        scene.wait_for(n)  # once the group has given up the other one
        stopped.continue_()
        ends = time.monotonic() + 2  # nothing may move; it would commit within 0.1 s, and asks its group each second
        while time.monotonic() < ends:
            assert scene.committed() == [n] * PARTITIONS
            time.sleep(0.05)
        scene.fill(50, first=n)
        scene.wait_for(n + 50)
        stopped.terminate()
        stopped.ended_well()
        repeated = [run for run, times in scene.runs().items() if times > 1]
        assert len(repeated) <= 2 * CONCURRENCY + 400  # what had not been committed, and what was at hand


def test_l4_what_is_read_goes_on_when_the_broker_was_away(own_broker: Broker, tmp_path: Path) -> None:
    with Crew(tmp_path) as crew, closing(Scene(own_broker.bootstrap, tmp_path, crew)) as scene:
        scene.fill(200)
        reader = scene.reader()
        scene.wait_for_some(60)
        own_broker.kill()
        own_broker.start()
        scene.wait_for(200)
        scene.fill(50, first=200)
        scene.wait_for(250)
        reader.terminate()
        reader.ended_well()
        assert "because of a bug in aiodelay" not in reader.errors
