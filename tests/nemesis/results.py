"""The table of results: how often each fault was injected, and the violations in the runs with this fault."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from .stage import Result

__all__ = ["as_markdown", "put_between_markers"]

BEGIN, END = "<!-- nemesis: begin -->", "<!-- nemesis: end -->"


def as_markdown(results: Mapping[str, Sequence[Result]], title: str) -> str:
    """Return a table with one row for each fault of each stack, and one row for all runs of a stack.

    Args:
        results: The results of all runs, by stack.
        title: What the text above the table says about the runs.
    """
    lines = [title, "", "| stack | fault | injected | violations |", "| --- | --- | --- | --- |"]
    for stack, runs in results.items():
        injected: Counter[str] = Counter()
        violations: defaultdict[str, int] = defaultdict(int)
        for run in runs:
            injected.update(run.injected)
            for fault in run.injected:
                violations[fault] += len(run.violations)
        lines += [f"| {stack} | {fault} | {injected[fault]:,} | {violations[fault]:,} |" for fault in sorted(injected)]
        lines.append(f"| {stack} | all | {injected.total():,} | {sum(len(run.violations) for run in runs):,} |")
    return "\n".join(lines)


def put_between_markers(document: str, table: str) -> str:
    """Return the document with the table between the two markers.

    Raises:
        ValueError: The document lacks the markers.
    """
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file has no lines {BEGIN} and {END}, between which the table belongs")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"
