"""`Outcome`: the result of one run of a test. `StormError`: a run with faults had another outcome than the calm run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiodelay.errors import AiodelayError

from .plan import Fault

__all__ = ["Outcome", "StormError"]

SHOWN = 1_000
"""The most characters of an outcome that an error shows."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one run of a test.

    Attributes:
        returned: A copy of the value that the test returned.
        dead_letters: The lane and the reason of each dead letter, sorted. Letters that were only late are left out.
        error: The exception of the test; None if the test passed.
        faults: The faults that have struck, in order.
        jumps: How often virtual time jumped.
    """

    returned: object
    dead_letters: Sequence[str]
    error: BaseException | None
    faults: Sequence[Fault]
    jumps: int

    def differs_from(self, calm: Outcome) -> bool:
        """Return whether the test failed, or ended in another way than without faults."""
        return self.error is not None or self.dead_letters != calm.dead_letters or bool(self.returned != calm.returned)

    def text(self) -> str:
        """Return the outcome as text."""
        if self.error is not None:
            return _cut(f"{type(self.error).__name__}: {self.error}")
        returned = "passed" if self.returned is None else _cut(repr(self.returned))
        return f"{returned}, dead letters: {', '.join(self.dead_letters)}" if self.dead_letters else returned


class StormError(AiodelayError, AssertionError):
    """A run of a test had another outcome than the run without faults.

    The cause is the exception of the test, if it raised one.

    Attributes:
        seed: The seed of the run. `@storm(seed=...)` repeats it.
        faults: The shortest list of faults that was found to change the outcome, one text for each fault.
        calm: The outcome without faults, as text.
        outcome: The outcome with these faults, as text.
    """

    seed: int
    faults: tuple[str, ...]
    calm: str
    outcome: str

    def __init__(self, seed: int, faults: tuple[str, ...], calm: str, outcome: str) -> None:
        super().__init__(seed, faults, calm, outcome)
        self.seed, self.faults, self.calm, self.outcome = seed, faults, calm, outcome

    def __str__(self) -> str:
        lines = [
            "the outcome of the test differs from that of the calm run, with these faults:",
            *(f"  {n}. {fault}" for n, fault in enumerate(self.faults, 1)),
            f"calm run: {self.calm}",
            f"in the storm: {self.outcome}",
            f"to repeat it: @storm(seed={self.seed})",
        ]
        return "\n".join(lines)


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
