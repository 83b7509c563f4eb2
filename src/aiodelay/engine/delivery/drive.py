"""Run a coroutine inside the current task, in a context of its own, without a task of its own.

A task per message costs more than all else that delivering one takes (docs/decisions/0003-runners.md has the figures).
So runner tasks take one message after another, and begin each message's coroutine by a plain call; `rest_of` awaits
what is left of one that waits. Its context variables end with it, as they would in a task of its own.
"""

from __future__ import annotations

import types
from collections.abc import Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

__all__ = ["rest_of"]

T = TypeVar("T")


@types.coroutine
def rest_of(coroutine: Coroutine[Any, Any, T], context: Context, awaited: object) -> Generator[Any, Any, T]:
    """Await what is left of a coroutine that was begun in `context`, in this task.

    Nothing else may be awaited between its beginning and this. Cancelling the task cancels the coroutine where it
    waits, as with a plain await.

    Args:
        coroutine: Begun with `send(None)`.
        context: Where it was begun.
        awaited: What that returned.
    """
    run, send, throw = context.run, coroutine.send, coroutine.throw
    try:
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # noqa: BLE001 - handed on to whom it is meant for
                awaited = run(throw, error)
            else:
                awaited = run(send, value)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        coroutine.close()
