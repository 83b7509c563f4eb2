"""How a job is called: its options by keyword, which it gets as one value; its summary tells its name and its time."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from msgspec import structs

from aiodelay.core.durations import to_epoch_ms
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.summary import Summary

__all__ = ["job", "judging_ms", "taking"]

Given = TypeVar("Given")
Options = TypeVar("Options")
Result = TypeVar("Result")
Keywords = ParamSpec("Keywords")


def taking(
    options: Callable[Keywords, Options],
) -> Callable[[Callable[[Given, Options], Result]], Callable[Concatenate[Given, Keywords], Result]]:
    """Have a function take the fields of its options as keywords, after what it works on."""

    def decorated(function: Callable[[Given, Options], Result]) -> Callable[Concatenate[Given, Keywords], Result]:
        first, _ = inspect.signature(function).parameters.values()
        shown = inspect.Signature([first, *inspect.signature(options).parameters.values()])

        @wraps(function)
        def run(*arguments: object, **keywords: object) -> Result:
            given = shown.bind(*arguments, **keywords).arguments
            return function(given.pop(first.name), cast("Callable[..., Options]", options)(**given))

        run.__signature__ = shown  # type: ignore[attr-defined]  # what `help` shows
        return run

    return decorated


def job(
    name: str, options: Callable[Keywords, Options]
) -> Callable[[Callable[[Given, Options], Summary]], Callable[Concatenate[Given, Keywords], Summary]]:
    """Make a job of a function that counts: it takes its options by keyword, its summary has its name and its time."""

    def decorated(function: Callable[[Given, Options], Summary]) -> Callable[Concatenate[Given, Keywords], Summary]:
        @taking(options)
        @wraps(function)
        def run(given: Given, options: Options) -> Summary:
            started_ms = (clock := SystemClock()).monotonic_ms()
            summary = function(given, options)
            return structs.replace(summary, job=name, seconds=(clock.monotonic_ms() - started_ms) / 1000)

        return run

    return decorated


def judging_ms(now: datetime | None) -> int:
    """Return the time by which a job judges, in epoch milliseconds: the one that is given, else this machine's."""
    return SystemClock().now_ms() if now is None else to_epoch_ms(now, field="now")
