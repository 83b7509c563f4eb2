"""Run the nemesis: `python -m tests.nemesis --minutes 10 --seed 7 --stack redis`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import traceback
from collections import Counter, defaultdict
from pathlib import Path

from .kafka import KafkaClusterStage, KafkaStage
from .redis import RedisStage, ValkeyStage
from .results import as_markdown, put_between_markers
from .sqlite import SqliteStage
from .stage import Result, Stage, play

STAGES: tuple[type[Stage], ...] = (SqliteStage, RedisStage, ValkeyStage, KafkaStage, KafkaClusterStage)
STACKS = {stage.name: stage for stage in STAGES}
ROUND_S = 120.0
"""The length of a round. Each round has new processes, a new store and the next seed."""
KEPT = Path(".nemesis")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nemesis", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for each stack; default 10")
    parser.add_argument("--seed", type=int, default=1, help="of the first round; each round has the next seed")
    parser.add_argument("--stack", choices=STACKS, action="append", help="default: all stacks")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="put the table between its markers in this file")
    parser.add_argument("--without-clock", action="store_true", help="step no clocks, so that they excuse nothing")
    chosen = parser.parse_args()
    if not chosen.minutes > 0:
        parser.error(f"argument --minutes: {chosen.minutes:g}: must be more than 0")
    return chosen


def run(stack: str, seed: int, seconds: float, *, with_clock: bool) -> Result:
    """Run one round. If a rule is broken, keep the history and the schedule, and say how to repeat the round."""
    with tempfile.TemporaryDirectory(prefix="aiodelay-nemesis-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            with STACKS[stack](folder, seed, seconds) as stage:
                result = play(stage, seed, seconds, with_clock=with_clock)
        except Exception:  # noqa: BLE001 - a round that cannot end is a finding, and the other rounds go on
            result = Result(Counter(), [f"the round did not end: {traceback.format_exc()}"], "")
        print(result.summary)
        if result.violations:
            kept = KEPT / f"{stack}-{seed}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept, ignore=shutil.ignore_patterns("*.sock"))
            print(*result.violations[:50], f"The history and the schedule are in {kept}.", sep="\n")
            options = "" if with_clock else " --without-clock"
            print(
                f"Repeat: nox -s nemesis -- --stack {stack} --seed {seed} --minutes {seconds / 60:g}{options}",
                flush=True,
            )
    return result


def main() -> int:
    chosen = options()
    results: defaultdict[str, list[Result]] = defaultdict(list)
    for stack in chosen.stack or STACKS:
        left_s, seed = chosen.minutes * 60, chosen.seed
        while left_s > 0:
            results[stack].append(run(stack, seed, min(left_s, ROUND_S), with_clock=not chosen.without_clock))
            left_s, seed = left_s - ROUND_S, seed + 1
    title = f"{chosen.minutes:g} minutes for each stack, in rounds of 2 minutes, seeds from {chosen.seed}:"
    table = as_markdown(results, title)
    print(table)
    for stack, runs in results.items():
        excused = sum(each.excused for each in runs) / len(runs)
        print(f"{stack}: steps of the clock excuse leases in {excused:.0%} of the time from S6, S7 and B1")
    if chosen.markdown is not None:
        chosen.markdown.write_text(put_between_markers(chosen.markdown.read_text(), table))
    return 1 if any(result.violations for runs in results.values() for result in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
