"""`rest_of`: run a coroutine in a context of its own, but inside the current task.

A task for each message would cost more than all other work of a delivery (docs/decisions/0003-runners.md has figures).
So a runner task takes one message after another, and begins each message's coroutine with a plain call. If the
coroutine waits, `rest_of` awaits the rest. The context variables that the coroutine sets end with it, as in a separate
task.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

__all__ = ["driven", "rest_of"]

T = TypeVar("T")


@types.coroutine
def rest_of(coroutine: Coroutine[Any, Any, T], context: Context, awaited: object) -> Generator[Any, Any, T]:
    """Await, in this task, the rest of a coroutine that was begun in `context`.

    Await nothing else between the beginning and this call. Cancelling the task cancels the coroutine where it waits, as
    with a plain await.

    Args:
        coroutine: A coroutine that was begun with `send(None)`.
        context: The context in which the coroutine was begun.
        awaited: The value that `send(None)` returned.
    """
    run, send, throw = context.run, coroutine.send, coroutine.throw
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # noqa: BLE001 - the coroutine gets it, as it would from a plain await
                awaited = run(throw, error)
            else:
                awaited = run(send, value)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        coroutine.close()


@types.coroutine
def driven(coroutine: Coroutine[Any, Any, T], context: Context) -> Generator[Any, Any, T]:
    """Await, in this task, a whole coroutine that runs in `context`. Everything else is as in `rest_of`."""
    try:
        awaited = context.run(coroutine.send, None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    return (yield from rest_of(coroutine, context, awaited))
