"""BA5: the time of `aiodelay --help`, compared with the import of its command-line parser."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from .harness import Benchmark, Goal, Plan, Row, in_turn

__all__ = ["BENCHMARK"]

TIMES = 10
GOAL = Goal("at most", 1.5)
HELP = ("-m", "aiodelay", "--help")
IMPORT = ("-c", "import cyclopts")


def run(plan: Plan) -> list[Row]:
    times = plan.size(TIMES)
    took = in_turn(plan, {"help": lambda: median_s(HELP, times), "import": lambda: median_s(IMPORT, times)})
    both = zip(took["help"], took["import"], strict=True)
    values = tuple(ours / theirs for ours, theirs in both)
    beside = f"{1000 * median(took['help']):.0f} ms, the import {1000 * median(took['import']):.0f} ms"
    return [Row("BA5", "run time of `aiodelay --help`", "x time of `import cyclopts`", values, GOAL, beside)]


def median_s(arguments: tuple[str, ...], times: int) -> float:
    """Return the median run time of a program."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        took.append(time.perf_counter() - began)
    return median(took)


BENCHMARK = Benchmark("BA5", "the command line's help", run)
