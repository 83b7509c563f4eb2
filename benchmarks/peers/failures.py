"""`python -m benchmarks.peers.failures [arq ...]`: count lost, doubled and late messages when workers are killed.

Each side has a Redis server of its own. The workers of one side are killed after those of another side. Then all sides
wait at the same time, because some libraries deliver the messages of a killed worker only after an hour.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from benchmarks.harness import Plan, WrongResultError, check
from benchmarks.redis_server import running_server
from benchmarks.report import surroundings

from .command_line import parser_of, publish
from .environments import Environment, environments_of, versions
from .processes import Run, Worker, wait_until
from .sides import AIODELAY, PEERS, SETTINGS, Peer, Side
from .stage import Stage, now_ms, staged
from .tables import table

__all__ = ["Messages", "Outcome", "as_markdown", "fail", "main", "outcome_of"]

MARKERS = "failures"
DUE, PENDING, KILLS = 300, 100, 3
HANDLER_S = 0.2
PENDING_AFTER_MS = 90_000
"""The time from the due time of the first messages to that of the pending messages."""
LEADS, LEAD_A_MESSAGE_MS = 4, 2
"""The time allowed for scheduling: the time of one message, times the first number, plus some ms for each message."""
STALLED_S = 15.0
"""A worker is killed after this time, even if it has begun too few messages, or runs none."""
TRAFFIC_EVERY_MS = 10_000
POLL_S = 2.0
AGAIN_S = 20.0
"""The time in which a message may still run again, after all messages have ended."""
PATIENCE_S = 3_900.0
"""More than an hour, after which Celery delivers the messages of a killed worker."""


class Messages(NamedTuple):
    """The messages of one side: their numbers, and when they are due, in epoch ms."""

    due: range
    due_ms: int
    pending: range
    pending_ms: int

    def times(self) -> dict[int, int]:
        """Return the due time of each message, in epoch ms."""
        return {**dict.fromkeys(self.due, self.due_ms), **dict.fromkeys(self.pending, self.pending_ms)}


class Outcome(NamedTuple):
    """The outcome of the messages of one side.

    Attributes:
        interrupted: Messages whose run a kill cut off.
        lost: Due messages that did not run to their end within the time limit.
        doubled: Messages that ran to their end more than once.
        late_s: The longest time from the due time of a due message to its first end; None if none ended.
        pending_lost: Pending messages that did not run to their end within the time limit.
        pending_late_s: The same as `late_s`, of the pending messages.
    """

    interrupted: int
    lost: int
    doubled: int
    late_s: float | None
    pending_lost: int
    pending_late_s: float | None


def outcome_of(messages: Messages, interrupted: int, ended: Sequence[Run]) -> Outcome:
    """Compare the ends of runs, in order of time, with the scheduled messages."""
    times = messages.times()
    counts = Counter(run.number for run in ended if run.number in times)
    late_s = {run.number: run.at_ns / 1e9 - times[run.number] / 1e3 for run in reversed(ended) if run.number in times}

    def longest(numbers: range) -> float | None:
        return max((late_s[number] for number in numbers if number in late_s), default=None)

    return Outcome(
        interrupted,
        sum(1 for number in messages.due if not counts[number]),
        sum(1 for count in counts.values() if count > 1),
        longest(messages.due),
        sum(1 for number in messages.pending if not counts[number]),
        longest(messages.pending),
    )


def fail(plan: Plan, side: Side, environment: Environment, patience_s: float, turn: Lock) -> Outcome:
    """Kill the worker of a side three times while it runs due messages. Each time, another worker starts at once.

    Args:
        plan: The plan, with the URL of a server that only this side uses.
        side: The side.
        environment: Its environment.
        patience_s: The longest wait for messages, in seconds.
        turn: Only the side that holds it kills workers.

    Raises:
        WrongResultError: Scheduling failed, or aiodelay lost a message.
    """
    with staged(plan, side, environment, HANDLER_S) as stage, ExitStack() as workers:
        with turn:
            messages, interrupted = _kill_workers(plan, stage, workers, patience_s)
        wanted = messages.times().keys()
        wait_until(lambda: _numbers(stage.ended()) >= wanted, patience_s, POLL_S)
        time.sleep(AGAIN_S)
        ended = stage.ended()
    outcome = outcome_of(messages, interrupted, ended)
    check(side.peer != AIODELAY or not (outcome.lost or outcome.pending_lost), f"aiodelay: {outcome}")
    return outcome


def _kill_workers(plan: Plan, stage: Stage, workers: ExitStack, patience_s: float) -> tuple[Messages, int]:
    """Return the messages and the number of interrupted messages. The last worker runs until `workers` closes."""
    worker = workers.enter_context(stage.ready())
    messages = _scheduled(plan, stage)
    wait_until(lambda: now_ms() >= messages.due_ms, (messages.due_ms - now_ms()) / 1000 + STALLED_S)
    step = max(len(messages.due) // (KILLS + 1), 1)
    interrupted = set[int]()
    for _ in range(KILLS):
        enough = len(_numbers(stage.began())) + step
        wait_until(partial(_is_in_the_middle, stage, enough), STALLED_S)
        interrupted |= _killed(stage, worker)
        worker = workers.enter_context(stage.working())
    # Some libraries look for the messages of a killed worker only when there is a new message.
    first, since_ms = messages.pending.stop, now_ms()
    traffic = range(round(patience_s * 1000 / TRAFFIC_EVERY_MS))
    stage.schedule({first + n: since_ms + n * TRAFFIC_EVERY_MS for n in traffic})
    return messages, len(interrupted & messages.times().keys())


def _scheduled(plan: Plan, stage: Stage) -> Messages:
    """Schedule the messages while a worker runs, before the first of them is due."""
    due, pending = plan.size(DUE), plan.size(PENDING)
    due_ms = now_ms() + LEADS * stage.probe_ms + (due + pending) * LEAD_A_MESSAGE_MS
    messages = Messages(range(due), due_ms, range(due, due + pending), due_ms + PENDING_AFTER_MS)
    stage.schedule(messages.times())
    return messages


def _is_in_the_middle(stage: Stage, enough: int) -> bool:
    """Return whether enough messages have begun, and some have not ended."""
    began = _numbers(stage.began())
    return len(began) >= enough and bool(began - _numbers(stage.ended()))


def _killed(stage: Stage, worker: Worker) -> set[int]:
    """Kill a worker. Return the messages that had begun and not ended."""
    worker.kill()
    return _numbers(stage.began()) - _numbers(stage.ended())


def _numbers(runs: Sequence[Run]) -> set[int]:
    return {run.number for run in runs}


# --- the table and the command ----------------------------------------------------------------------------


def as_markdown(
    outcomes: Mapping[Side, Outcome | str], left_out: Mapping[Peer, str], around: Mapping[str, str], patience_s: float
) -> str:
    """Return the tables, the peers that were left out, and the conditions.

    Args:
        outcomes: The outcome of each side, or why it failed.
        left_out: Why a peer was not measured.
        around: The machine and the versions.
        patience_s: The longest wait for messages, in seconds.
    """
    head = ("peer", "settings", *(f"{of}: {what}" for of in ("due", "pending") for what in ("not run", "late by")))
    rows = [(side.peer.name, side.settings, *_cells(outcome)) for side, outcome in outcomes.items()]
    peers = dict.fromkeys(side.peer for side in outcomes)
    parts = [
        table((*head[:2], "interrupted", "ended twice", *head[2:]), rows),
        table(("peer", "a message runs again after a kill"), [(peer.name, peer.redelivery) for peer in peers]),
        *(f"Left out: {peer.name}, because {why}." for peer, why in left_out.items()),
        f"Conditions: wait of {patience_s / 60:g} minutes, "
        + ", ".join(f"{name} {value}" for name, value in around.items())
        + ".",
    ]
    return "\n\n".join(parts)


def _cells(outcome: Outcome | str) -> tuple[str, ...]:
    if isinstance(outcome, str):
        return (f"failed: {outcome}", *[""] * 5)
    return (
        f"{outcome.interrupted:,}",
        f"{outcome.doubled:,}",
        f"{outcome.lost:,}",
        _seconds(outcome.late_s),
        f"{outcome.pending_lost:,}",
        _seconds(outcome.pending_late_s),
    )


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "none ran"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named peers (default: all) beside aiodelay."""
    options = _parser().parse_args(arguments)
    by_name = {peer.name: peer for peer in PEERS}
    names = dict.fromkeys([AIODELAY.name, *(options.names or by_name)])
    if unknown := names.keys() - by_name:
        print(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(by_name)}", file=sys.stderr)
        return 2
    environments, left_out = environments_of([by_name[name] for name in names], options.cache)
    with tempfile.TemporaryDirectory(prefix="aiodelay-peers-", dir=options.directory) as directory:
        plan = Plan(Path(directory), runs=1, scale=options.scale)
        with running_server(None) as url:
            around = surroundings(replace(plan, redis=url)) | versions(environments)
        sides = {Side(peer, each): environments[peer] for each in SETTINGS for peer in environments}
        outcomes = _outcomes(plan, sides, options.patience)
    text = as_markdown(outcomes, left_out, around, options.patience)
    publish(text, options.markdown, MARKERS)
    return 0


def _outcomes(plan: Plan, sides: Mapping[Side, Environment], patience_s: float) -> dict[Side, Outcome | str]:
    turn = Lock()

    def measure(side: Side) -> Outcome | str:
        outcome: Outcome | str
        try:
            with running_server(None) as url:
                outcome = fail(replace(plan, redis=url), side, sides[side], patience_s, turn)
        except WrongResultError as error:
            if side.peer == AIODELAY:
                raise
            outcome = f"{error}"
        print(f"{side}: {outcome}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(sides)) as threads:
        return dict(zip(sides, threads.map(measure, sides), strict=True))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.peers.failures", __doc__)
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        metavar="S",
        help=f"the longest wait, in s (default: {PATIENCE_S:g})",
    )
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the workers are killed, too
    sys.exit(main())
