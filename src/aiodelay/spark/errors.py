"""What of ours is behind an error of Spark's: the clear line, out of a trace of two languages."""

from __future__ import annotations

import re

import aiodelay.errors
from aiodelay.errors import AiodelayError, ConfigurationError, InputError, StoreUnavailableError

__all__ = ["SparkFailedError", "clear_error"]

_LINE = re.compile(r"^(?:aiodelay\.\w+(?:\.\w+)*\.)(?P<name>\w+Error): (?P<text>.*)$", re.MULTILINE)


class SparkFailedError(AiodelayError):
    """A Spark job ended with an error of Spark's own.

    Attributes:
        reason: Its first line.
    """

    reason: str

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"Spark: {self.reason}"


def clear_error(error: BaseException) -> AiodelayError:
    """Return the error of ours that made a Spark job fail, wherever it was raised: here, or in a Python worker.

    Of one that was raised elsewhere only the text is known; it has the class of the error for which exit codes and
    callers look: `InputError`, `ConfigurationError`, `StoreUnavailableError`.
    """
    if isinstance(error, AiodelayError):
        return error
    found = list(_LINE.finditer(f"{error}"))
    if not found:
        first = next((line for line in f"{error}".splitlines() if line.strip()), type(error).__name__)
        return SparkFailedError(first)
    name, text = found[-1]["name"], found[-1]["text"]
    kind = getattr(aiodelay.errors, name, SparkFailedError)
    for known in (StoreUnavailableError, InputError, ConfigurationError):
        if issubclass(kind, known):
            return _with_text(known, text)
    return SparkFailedError(text)


def _with_text(kind: type[AiodelayError], text: str) -> AiodelayError:
    class Elsewhere(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            Exception.__init__(self, text)

        def __str__(self) -> str:
            return text

    Elsewhere.__name__ = Elsewhere.__qualname__ = kind.__name__
    return Elsewhere()
