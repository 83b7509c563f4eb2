"""Middleware around each run of a handler, or around each scheduled message. Both kinds have the same form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

__all__ = ["Middleware", "chained"]

S = TypeVar("S")
R = TypeVar("R")

Middleware: TypeAlias = Callable[[S, Callable[[S], Awaitable[R]]], Awaitable[R]]
"""`async def middleware(subject, call_next)`. It returns the result of `await call_next(subject)`."""


def chained(
    middleware: Sequence[Middleware[S, R]], innermost: Callable[[S], Awaitable[R]]
) -> Callable[[S], Awaitable[R]]:
    """Return a function that calls all middleware around `innermost`. The first middleware is the outermost."""
    call = innermost
    for each in reversed(middleware):
        call = partial(_call, each, call)
    return call


def _call(each: Middleware[Any, R], call_next: Callable[[Any], Awaitable[R]], subject: object) -> Awaitable[R]:
    return each(subject, call_next)
