"""Search for the cause of a failed Spark job: the aiodelay error inside the long text of Spark's error.

The commands of `aiodelay spark` use `clear_error`, and programs may use it too.
"""

from __future__ import annotations

import re

import aiodelay.errors
from aiodelay.errors import AiodelayError

__all__ = ["SparkFailedError", "clear_error"]

_OURS = re.compile(r"^[\s|]*aiodelay(?:\.\w+)*\.(?P<name>\w+): (?P<text>.*)$", re.MULTILINE)
_RAISED = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception|Warning|Interrupt|Exit)(?:: .*)?$", re.MULTILINE)
_STATE = re.compile(r"\s*SQLSTATE: \w{5}.*$")
_IN_PYTHON = "Traceback (most recent call last)"
_CALLING = "An error occurred while calling "
"""The beginning of py4j's line above the error of Java."""


class SparkFailedError(AiodelayError):
    """A Spark job ended with an error that aiodelay did not raise.

    Attributes:
        reason: The line of Spark's error that says what happened.
    """

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"Spark: {self.reason}"


def clear_error(error: BaseException) -> AiodelayError:
    """Return the aiodelay error that made a Spark job fail, raised in this process or in a Python worker.

    An error from a worker arrives with its class and text, but without its attributes. If the job failed for another
    reason, the result is a `SparkFailedError` with the line of the trace that says what happened.
    """
    if isinstance(error, AiodelayError):
        return error
    text = f"{error}"
    for found in reversed(list(_OURS.finditer(text))):
        kind = getattr(aiodelay.errors, found["name"], None)
        if isinstance(kind, type) and issubclass(kind, AiodelayError):
            return _with_text(kind, _STATE.sub("", found["text"]))
    raised = list(_RAISED.finditer(text)) if _IN_PYTHON in text else []
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith(_CALLING))
    first = next(lines, type(error).__name__).strip().removeprefix(": ")
    return SparkFailedError(_STATE.sub("", raised[-1][0] if raised else first))


def _with_text(kind: type[AiodelayError], text: str) -> AiodelayError:
    class Elsewhere(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            Exception.__init__(self, text)

        def __str__(self) -> str:
            return text

    Elsewhere.__name__ = Elsewhere.__qualname__ = kind.__name__
    return Elsewhere()
