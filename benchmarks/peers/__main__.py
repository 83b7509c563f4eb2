"""`python -m benchmarks.peers [arq ...]`: measure aiodelay and its peers, and write their tables.

Each peer is installed into an environment of its own, in a cache folder.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

from benchmarks.harness import Plan, WrongResultError
from benchmarks.redis_server import running_server
from benchmarks.report import surroundings

from .command_line import parser_of, publish
from .environments import Environment, environments_of, versions
from .measures import Measured, drain, idle, late
from .sides import AIODELAY, PEERS, SETTINGS, Side
from .tables import as_markdown

T = TypeVar("T")
MARKERS = "peers"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the named peers (default: all) beside aiodelay."""
    options = _parser().parse_args(arguments)
    by_name = {peer.name: peer for peer in PEERS}
    unknown = sorted(set(options.names) - set(by_name))
    if unknown:
        print(f"no such peer: {', '.join(unknown)}; there are {', '.join(by_name)}", file=sys.stderr)
        return 2
    wanted = [peer for peer in PEERS if not options.names or peer == AIODELAY or peer.name in options.names]
    environments, left_out = environments_of(wanted, options.cache)
    with ExitStack() as stack:
        directory = tempfile.TemporaryDirectory(prefix="aiodelay-peers-", dir=options.directory)
        url = stack.enter_context(running_server(options.redis))
        plan = Plan(Path(stack.enter_context(directory)), options.runs, options.scale, redis=url)
        around = surroundings(plan)
        measured = _measure_all(
            plan, {Side(peer, each): environments[peer] for each in SETTINGS for peer in environments}
        )
    around |= versions(environments)
    text = as_markdown(measured, left_out, around)
    publish(text, options.markdown, MARKERS)
    return 0


def _measure_all(plan: Plan, environments: dict[Side, Environment]) -> dict[Side, Measured]:
    """Measure the sides in turn, each round another side first. Memory and idle are measured once."""
    sides = list(environments)
    measured = {side: Measured() for side in sides}

    def measure(side: Side, how: Callable[[Plan, Side, Environment], T], into: dict[int, T], number: int) -> None:
        try:
            into[number] = how(plan, side, environments[side])
        except WrongResultError as error:
            if side.peer == AIODELAY:
                raise
            measured[side].failures.append(f"{how.__name__}: {error}")
            print(f"{side}, {how.__name__} failed: {error}", flush=True)
        else:
            print(f"{side}, {how.__name__}: {into[number]}", flush=True)

    for number in range(plan.runs):
        first = number % len(sides)
        for side in sides[first:] + sides[:first]:
            measure(side, drain, measured[side].drains, number)
            measure(side, late, measured[side].lateness, number)
    for side in sides:
        measure(side, idle, measured[side].idles, 0)
    return measured


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.peers", __doc__)
    parser.add_argument("--runs", type=int, default=3, help="number of rounds of drain and lateness (default: 3)")
    parser.add_argument("--redis", metavar="URL", help="a Redis server with an empty database (default: start one)")
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the worker is killed, too
    sys.exit(main())
