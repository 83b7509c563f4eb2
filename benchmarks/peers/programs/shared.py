"""For each program: the settings of the run, the messages to schedule, and the record of the handled messages.

Only the standard library is imported here, because the environment of each peer runs this module.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

__all__ = ["HANDLER_S", "IS_BEST", "MODULE", "URL", "Asked", "began", "ended", "main", "now_ms"]

URL = os.environ["PEER_REDIS"]
IS_BEST = os.environ["PEER_SETTINGS"] == "best"
HANDLER_S = float(os.environ["PEER_HANDLER_S"])
"""How long a handler runs; 0 for an empty handler."""
MODULE = f"{__package__}."
"""The prefix of a program's module, for a command that imports the program."""

_AROUND = len('{"number":,"text":""}')
_PAYLOAD_BYTES = 200
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RECORD = os.open(os.environ["PEER_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


class Asked(NamedTuple):
    """A message to schedule. Its arguments, `number` and `text`, have 200 bytes as JSON."""

    number: int
    due_ms: int

    @property
    def text(self) -> str:
        return "x" * (_PAYLOAD_BYTES - _AROUND - len(str(self.number)))

    @property
    def due(self) -> datetime:
        return _EPOCH + timedelta(milliseconds=self.due_ms)

    @property
    def delay_ms(self) -> int:
        """The milliseconds until the message is due. A delay that starts now is never too short."""
        return max(0, self.due_ms - now_ms())


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def began(number: int) -> None:
    """Record that a handler begins. The record is in the system's cache, so it outlives a killed process."""
    os.write(_RECORD, b"b %d %d\n" % (number, time.time_ns()))


def ended(number: int) -> None:
    """Record that a handler ends."""
    os.write(_RECORD, b"e %d %d\n" % (number, time.time_ns()))


def main(schedule: Callable[[list[Asked]], None], work: Callable[[], None]) -> None:
    """Run the command of the program."""
    match sys.argv[1:]:
        case ["schedule"]:
            schedule([Asked(*map(int, line.split())) for line in sys.stdin])
        case ["work"]:
            work()
        case other:
            sys.exit(f"schedule or work, not {other}")
