"""Decorators of jobs. Callers give options by keyword, and the summary gets the job's name and duration."""

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
    """Decorate a function that takes a frame or session, and an options value.

    Callers of the decorated function give each option by keyword.
    """

    def decorated(function: Callable[[Given, Options], Result]) -> Callable[Concatenate[Given, Keywords], Result]:
        first, _ = inspect.signature(function).parameters.values()
        shown = inspect.Signature([first, *inspect.signature(options).parameters.values()])

        @wraps(function)
        def run(*arguments: object, **keywords: object) -> Result:
            given = shown.bind(*arguments, **keywords).arguments
            return function(given.pop(first.name), cast("Callable[..., Options]", options)(**given))

        run.__signature__ = shown  # type: ignore[attr-defined]  # for `help`
        return run

    return decorated


def job(
    name: str, options: Callable[Keywords, Options]
) -> Callable[[Callable[[Given, Options], Summary]], Callable[Concatenate[Given, Keywords], Summary]]:
    """Decorate the function of a job as `taking` does, and set the job's name and duration in its summary."""

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
    """Return the current time for the checks of a job, in epoch ms: the given time, else the clock of this machine."""
    return SystemClock().now_ms() if now is None else to_epoch_ms(now, field="now")
