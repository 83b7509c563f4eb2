"""An index restored from a checkpoint equals the index that was saved, before and after more changes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.pending.checkpoint import Checkpoint, Witness, checkpoint_of
from aiodelay.backends.kafka.pending.far_index import FarIndex, open_far
from aiodelay.backends.kafka.pending.pending_index import PendingIndex
from aiodelay.backends.kafka.pending.placement import Placement
from aiodelay.backends.kafka.watermark import Watermark
from aiodelay.core.transitions import NO_OP, occurrence_id
from aiodelay.core.values import DeadKey, DeadLetter, Envelope, Record, Stored
from aiodelay.kafka.records import Memory, Read, Wire
from aiodelay.testing.clock import VirtualClock
from tests.support.disks import IN_MEMORY

pytestmark = pytest.mark.slow

NOW = VirtualClock().now_ms()
HORIZON_MS, FAR_MS = 10_000, 100_000
KEYS = ("a", "b", occurrence_id("a", NOW))
RULE: dict[str, str | int] = {"e": 60_000}


class Step(NamedTuple):
    """What is written, or done with what has been read, and how."""

    what: str
    of: str
    due_ms: int
    n: int


STEPS = st.builds(
    Step,
    st.sampled_from(
        ["put"] * 6
        + ["again", "cancel", "end", "put again", "put again", "series", "bad", "letter", "purge", "hold", "release"]
        + ["mark", "barrier", "partitions", "keep", "kept", "come near", "put off"]
    ),
    st.sampled_from(KEYS),
    st.sampled_from([NOW, NOW + 5_000, NOW + FAR_MS]),
    st.integers(0, 2),
)


class World:
    """A partition, written step by step."""

    def __init__(self) -> None:
        self.log: list[Read] = []
        self.read_to = 0

    def write(self, step: Step) -> Read | None:
        """Write what a step writes, if anything."""
        wire = self._wire(step)
        if wire is None:
            return None
        self.log.append(Read(len(self.log), NOW - 100 + len(self.log) // 3, *wire))
        return self.log[-1]

    def _wire(self, step: Step) -> Wire | None:  # noqa: PLR0911, PLR0912 - each step's own
        offset, key = len(self.log), records.key_of(step.of)
        self.read_to = max(self.read_to, offset - step.n)
        op = b"%08d" % offset if step.n else NO_OP
        record = Record(Envelope(step.of, "kafka", "t", payload=b"%d" % offset), 0, step.due_ms, op)
        known = [each for each in self.log if each.key == key and each.value and not dict(each.headers).get("rule")]
        memory = Memory([(f"{step.n:016x}", "rescheduled", 7, NOW, NOW + 5_000)], (step.n, NOW + 50_000))
        match step.what:
            case "put":
                return records.encode_record(record)
            case "again":
                return Wire(*known[-1][2:]) if known else None  # type: ignore[arg-type]
            case "cancel":
                return records.encode_cancel(key, memory if step.n else None)
            case "end":
                ended = [records.op_of(each.headers).hex() for each in known if each.offset < self.read_to]
                answers = [(each, "stored", 7, NOW, NOW + 9_000) for each in ended if each != NO_OP.hex()]
                return records.encode_end(key, read_to=self.read_to, outcome="delivered", memory=Memory(answers))
            case "put again":
                record = msgspec.structs.replace(record, revision=NOW + offset, attempt=2)
                return records.encode_record(
                    record, read_to=self.read_to, place_ms=step.due_ms + 7, memory=memory if step.n else None
                )
            case "series":
                envelope = msgspec.structs.replace(record.envelope, rule=RULE)
                return records.encode_record(msgspec.structs.replace(record, envelope=envelope))
            case "bad":
                return Wire(key, b"", [("scheduler-epoch", b"soon")])
            case "letter":
                return records.encode_dead(DeadLetter(record, "attempts_exhausted", NOW))
            case "purge":
                return Wire(records.dead_key(DeadKey(step.of, 0)), None, [])
            case "hold" | "release":
                address = "t" if step.n else None
                return records.encode_hold("kafka", address, is_held=step.what == "hold")
            case "mark":
                return records.encode_mark(Watermark(NOW - 50 + 20 * step.n, self.read_to))
            case "barrier":
                return Wire(records.BARRIER, b"", [])
            case "partitions":
                return Wire(records.PARTITIONS, b"%d" % (step.n + 1), [])
            case "keep":
                return records.encode_keep(record)
            case "kept":
                return records.encode_end(records.KEEP + key, read_to=self.read_to, outcome="ended")
        return None


def make_index(far: FarIndex | None = None) -> PendingIndex:
    index = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1), far=far)
    index.far.look_ahead(NOW + HORIZON_MS)
    return index


def play(index: PendingIndex, world: World, steps: Sequence[tuple[Step, Read | None]]) -> None:
    """Read what was written, and do with it what is to be done."""
    for step, read in steps:
        if read is not None:
            index.reader.read(read)
        elif step.what == "put off":
            index.far.put_off()
        elif step.what == "come near":
            bring(index, step.of, world)


def bring(index: PendingIndex, message_id: str, world: World) -> None:
    if (row := index.state.far.find(records.key_of(message_id))) is not None:
        index.come_near(world.log[row.offset])


def left(index: PendingIndex, world: World, path: Path) -> PendingIndex:
    """Leave an index on disk, and go on from there."""
    last = world.log[index.state.read_to - 1]
    witness = Witness.of(last.offset, last.timestamp, last.key, last.value)
    checkpoint = checkpoint_of(index.state, index.table, index.placement, witness=witness, now=NOW, whole_ms=0)
    index.state.far.commit(msgspec.msgpack.encode(checkpoint))
    index.state.far.put(b"uncommitted", NOW + FAR_MS, 5, "kafka", is_users=True)
    index.state.far.close()
    far, state = open_far(str(path))
    kept = msgspec.msgpack.decode(state, type=Checkpoint)
    found = PendingIndex(clock=VirtualClock(), placement=Placement("t/0"), claims=count(1), far=far)
    found.reader.begin(kept)
    for offset in kept.offsets:
        found.reader.read(world.log[offset])
    found.reader.go_on()
    found.far.look_ahead(NOW + HORIZON_MS)
    return found


def state_of(index: PendingIndex, world: World) -> dict[str, Any]:
    """All that decides what an index does next, once its owner has brought near what it must."""
    for message_id in index.far.wanted():
        bring(index, message_id, world)
    return {
        "read to": index.state.read_to,
        "entries": {key: (entry.record, entry.place_ms) for key, entry in index.table.entries.items()},
        "standings": index.state.standings,
        "hidden": index.state.hidden.keys(),
        "bad": {key: (read.offset, problem) for key, (read, problem) in index.state.bad.items()},
        "repeated": index.state.over.keys(),
        "asked": {key: [(each.offset, each.what) for each in asked] for key, asked in index.state.asked.items()},
        "dead": {letter.key: letter for letter in index.table.letters},
        "holds and series": asyncio.run(_holds_and_series(index, world)),
        "mark": (index.state.mark, index.state.ended_at),
        "partitions": index.state.partitions,
        "answers": {op: value for op, *value in index.table.answers.by_op.items(NOW) if isinstance(value[0], Stored)},
        "versions": {key: value for key, *value in index.table.answers.versions.items(NOW)},
        "far": {key: index.state.far.find(records.key_of(key)) for key in KEYS},
        "how many": (len(index.state.far), +index.state.far.by_lane),
        "next mark": index.next_mark(),
        "raised": index.state.raised & index.table.entries.keys(),
    }


async def _holds_and_series(index: PendingIndex, world: World) -> tuple[Sequence[tuple[str, str | None]], list[str]]:
    """Return the holds and the recurring messages: all entries with a rule, of which none is far."""
    found = [each.record.id for each in index.inspection.series(None, 100, NOW)]
    assert found == sorted(
        each for each, entry in index.table.entries.items() if entry.record.envelope.rule is not None
    )
    rows = [row for each in KEYS if (row := index.state.far.find(records.key_of(each))) is not None]
    assert not [row for row in rows if records.HEADER["rule"] in dict(world.log[row.offset].headers)]
    return index.inspection.paused(), found


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=14), st.lists(STEPS, max_size=8))
@example([Step("series", "a", NOW + FAR_MS, 0), Step("put off", "a", NOW, 0)], [Step("put", "a", NOW + FAR_MS, 0)])
@example([Step("put", "a", NOW + FAR_MS, 0)], [Step("series", "a", NOW, 0), Step("bad", "a", NOW, 0)])
@example([Step("put", "a", NOW, 1), Step("end", "a", NOW, 0), Step("again", "a", NOW, 0)], [])
@example(
    [Step("cancel", "b", NOW, 0), Step("put", "b", NOW, 0)], [Step("cancel", "a", NOW, 0), Step("end", "b", NOW, 0)]
)
def test_an_index_goes_on_as_if_it_had_never_been_left(before: list[Step], after: list[Step]) -> None:
    with TemporaryDirectory(dir=IN_MEMORY) as folder:
        leave_and_go_on(Path(folder, "t-0.index"), before, after)


def leave_and_go_on(path: Path, before: Sequence[Step], after: Sequence[Step]) -> None:
    world = World()
    first = [(step, world.write(step)) for step in before]
    then = [(step, world.write(step)) for step in after]
    stayed, leaving = make_index(), make_index(FarIndex(str(path)))
    for index in (stayed, leaving):
        play(index, world, first)
    if not leaving.state.read_to:
        return
    restored = left(leaving, world, path)
    assert state_of(restored, world) == state_of(stayed, world)
    for index in (stayed, restored):
        play(index, world, then)
    assert state_of(restored, world) == state_of(stayed, world)
    whole = make_index()
    play(whole, world, [(step, read) for step, read in first + then if read is not None])
    assert stands(restored, world) == stands(whole, world)


def stands(index: PendingIndex, world: World) -> dict[str, Any]:
    """What does not depend on what was held whole."""
    for read in world.log:
        index.come_near(read)
    found = state_of(index, world)
    entries = {key: (record.envelope, place_ms) for key, (record, place_ms) in found["entries"].items()}
    names = ("bad", "repeated", "asked", "dead", "holds and series", "mark", "partitions", "hidden", "standings")
    return {"entries": entries} | {name: found[name] for name in names}


LOAD = """
import sqlite3, sys
from aiodelay.backends.kafka.pending.far_index import open_far
sqlite3.connect(":memory:").execute("PRAGMA hard_heap_limit = 4500000")
far, state = open_far(sys.argv[1])
print(len(far), state)
"""


def test_the_memory_in_which_a_file_is_checked_does_not_grow_with_its_rows(tmp_path: Path) -> None:
    path, n = f"{tmp_path / 'index'}", 80_000
    far = FarIndex(path)
    for i in range(n):
        far.put(b"%d" % i, NOW + FAR_MS, i, "kafka", is_users=True)
    far.commit(b"state")
    far.close()
    loaded = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, text=True, check=False)
    assert (loaded.stdout, loaded.stderr) == (f"{n} b'state'\n", "")
