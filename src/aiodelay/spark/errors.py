"""What of ours is behind an error of Spark's: the clear line, out of a trace of two languages."""

from __future__ import annotations

import re

import aiodelay.errors
from aiodelay.errors import AiodelayError

__all__ = ["SparkFailedError", "clear_error"]

_OURS = re.compile(r"^[\s|]*aiodelay(?:\.\w+)*\.(?P<name>\w+): (?P<text>.*)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception|Warning|Interrupt|Exit)(?:: .*)?$", re.MULTILINE)
_STATE = re.compile(r"\s*SQLSTATE: \w{5}.*$")
_IN_PYTHON = "Traceback (most recent call last)"


class SparkFailedError(AiodelayError):
    """A Spark job ended with an error of Spark's own.

    Attributes:
        reason: The line that says what happened.
    """

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"Spark: {self.reason}"


def clear_error(error: BaseException) -> AiodelayError:
    """Return the error of ours that made a Spark job fail, wherever it was raised: here, or in a Python worker.

    Of one that was raised elsewhere only its class and its text are known. What is none of ours is told as
    `SparkFailedError`, by the line of the trace that says what happened.
    """
    if isinstance(error, AiodelayError):
        return error
    text = f"{error}"
    for found in reversed(list(_OURS.finditer(text))):
        kind = getattr(aiodelay.errors, found["name"], None)
        if isinstance(kind, type) and issubclass(kind, AiodelayError):
            return _with_text(kind, _STATE.sub("", found["text"]))
    raised = list(_RAISED.finditer(text)) if _IN_PYTHON in text else []
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return SparkFailedError(_STATE.sub("", raised[-1][0] if raised else first.strip()))


def _with_text(kind: type[AiodelayError], text: str) -> AiodelayError:
    class Elsewhere(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            Exception.__init__(self, text)

        def __str__(self) -> str:
            return text

    Elsewhere.__name__ = Elsewhere.__qualname__ = kind.__name__
    return Elsewhere()
