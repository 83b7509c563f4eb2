"""`PendingIndex`: the pending messages of one partition. Only the records of the partition fill it.

All stores share the rules, claims, leases and fairness. On Kafka, a message changes only when the change was written to
the partition and read back. Each settlement makes a `Change`, and so does a message that has become too late. Nobody
else can claim or change the message until the change's record is read back, or the session ends without it.

A *near* message is due within the horizon: the table has it whole. A *far* message is due later: the index has little
more than the offset of its record. Nothing in this package uses the network. The parts:

- `record_reader.py` takes records in.
- `decisions.py` decides for the owner, and `repairs.py` makes the changes that repair the partition.
- `pending_table.py` keeps the near messages, and corrects the lists of retries of series.
- `change_table.py` turns decisions into changes. `changes.py` keeps the changes until they are read back.
- `due_messages.py` moves due messages to their topics.
- `far_messages.py` makes near messages far, and finds the far messages that must come near.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection
from itertools import count

from msgspec.structs import replace

from aiodelay.backends.kafka import records
from aiodelay.backends.kafka.records import Read
from aiodelay.backends.kafka.watermark import Watermark
from aiodelay.core.dict_table.claims import DictClaiming, LaneHeads
from aiodelay.core.dict_table.entries import Entry
from aiodelay.core.dict_table.inspection import DictInspection
from aiodelay.core.dict_table.table import DictTable, Worker, Workers
from aiodelay.core.rules import Rules
from aiodelay.core.transitions import NO_OP
from aiodelay.core.values import JournalEntry, Lane, Tidied
from aiodelay.ports.clock import Clock

from .change_table import ChangeTable
from .changes import MOST_NOTES, Change, ChangeLog
from .decisions import Decisions
from .due_messages import DueMessages
from .far_index import FarIndex
from .far_messages import FarMessages
from .paced_lanes import PacedLanes
from .pending_table import PendingTable
from .placement import Placement
from .rate_limit import RateLimit
from .read_state import ReadState
from .record_reader import RecordReader
from .repairs import Repairs

__all__ = ["PendingIndex"]

log: logging.Logger = logging.getLogger("aiodelay.kafka")


class PendingIndex:
    """The pending messages of one partition.

    Args:
        clock: The clock of the store.
        placement: The number of the partition, and checks of its messages.
        claims: Gives the numbers that make the tokens of claims differ.
        pace: The rate of overdue messages, shared by all partitions of a store.
        keeps_history: Whether to note the events of messages for the history topic.
        far: The rows of the far messages; None = no far messages.
        workers: The dispatching roles that this process has opened.
        notes: Entries of the journal that wait to be written.
    """

    placement: Placement
    name: str
    workers: Workers
    state: ReadState
    table: DictTable
    log: ChangeLog
    claiming: DictClaiming
    inspection: DictInspection
    reader: RecordReader
    far: FarMessages
    due: DueMessages
    decisions: Decisions
    repairs: Repairs

    def __init__(
        self,
        *,
        clock: Clock,
        placement: Placement,
        claims: count[int],
        pace: RateLimit | None = None,
        keeps_history: bool = False,
        far: FarIndex | None = None,
        workers: Workers | None = None,
        notes: deque[JournalEntry] | None = None,
    ) -> None:
        self._clock, self._claims, self._pace = clock, claims, pace or RateLimit(0)
        self.placement, self.name = placement, placement.name
        self.workers = Workers() if workers is None else workers
        self.state = ReadState(FarIndex() if far is None else far)
        self.table = table = PendingTable(self.workers)
        notes = deque(maxlen=MOST_NOTES) if notes is None else notes
        self.log = ChangeLog(table, self.state, name=placement.name, keeps_history=keeps_history, notes=notes)
        changing = ChangeTable(table, self.log, clock)
        self.rules: Rules[Entry] = Rules(changing)
        self._lanes = PacedLanes(table, LaneHeads(table, self.rules), self._pace)
        self.claiming = DictClaiming(table, self.rules, self._lanes, claims)
        self.inspection = DictInspection(table, self.claiming)
        self.reader = RecordReader(self.log, self.inspection, placement, clock, superseded=changing.superseded)
        self.far = FarMessages(self.log, self.inspection, clock)
        self.due = DueMessages(self.rules, self.log, self._lanes, self.claiming)
        self.decisions = Decisions(self.rules, self.log, clock)
        self.repairs = Repairs(self.decisions, self.log, name=placement.name)

    def emptied(self, far: FarIndex) -> PendingIndex:
        """Return an empty index with these far messages, for the same partition and workers."""
        index = PendingIndex(
            clock=self._clock,
            placement=self.placement.unread(),
            claims=self._claims,
            pace=self._pace,
            keeps_history=self.log.keeps_history,
            far=far,
            workers=self.workers,
            notes=self.log.notes,
        )
        index.log.without_traceback = self.log.without_traceback
        return index

    # --- for the owner ------------------------------------------------------------------------------------

    def come_near(self, read: Read) -> None:
        """Decode a far message and put it into the table, if its record is still the standing record of its key."""
        entry = self.reader.come_near(read)
        if entry is not None and self.state.mark.covers(read.offset, entry.place_ms):
            self.repairs.set_aside(records.key_of(entry.record.id), entry)

    def next_mark(self) -> Watermark | None:
        """Return a new watermark (see `Watermark`), or None if it would cover no more than the last watermark."""
        state, now = self.state, self._clock.now_ms()
        if not state.has_ended:
            return None
        waiting = [entry for lane in self.table.lanes.values() for entry in lane.foremost()]
        waiting += self.table.leased.values()
        waiting += [] if (overdue := self._lanes.overdue()) is None else [overdue]
        waiting += [change.entry for change in self.log.under_way if change.entry is not None]
        places = [*(entry.place_ms for entry in waiting), *state.left.values()]
        until_ms = min((place_ms - 1 for place_ms in places), default=now)
        if state.far:
            until_ms = min(until_ms, state.edge_ms - 1)
        mark = Watermark(min(until_ms, now), state.read_to)
        return mark if mark.is_beyond(state.mark) else None

    def give_back(self) -> list[Change]:
        """Undo all changes that are under way, and return them."""
        self._lanes.release_all()
        return self.log.give_back()

    def tidy(self, worker: Worker, lanes: Collection[Lane], limit: int) -> Tidied:
        """Do one step of housekeeping."""
        tidied = self.claiming.tidy(worker, lanes, limit, self._clock.now_ms())
        listed = {state.lane for state in tidied.lanes}
        far = [lane for lane, n in self.state.far.by_lane.items() if n and lane not in listed]
        states = [self.claiming.lane_state(lane, tidied.now_ms) for lane in far]
        return replace(tidied, lanes=[*tidied.lanes, *states])

    # --- inspection ---------------------------------------------------------------------------------------

    def knows(self, message_id: str, op: bytes = NO_OP) -> bool:
        """Say whether this index has a message, or remembers the answer to a command."""
        is_here = self.table.find(message_id) is not None or self.far.has(message_id)
        return is_here or self.reader.has_answered(op)

    @property
    def pending(self) -> int:
        """The number of messages, near and far."""
        return len(self.table.entries) + len(self.state.far)
