"""Run a coroutine inside the current task, in a context of its own, and learn whether it ever waited.

A task per message costs more than all else that delivering one takes (docs/decisions/0003-runners.md has the figures).
So runner tasks take one message after another, and each message's coroutine is driven here: its context variables end
with it, as they would in a task of its own, and `on_wait` is called when it first gives up control.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def drive(coroutine: Coroutine[Any, Any, T], context: Context, on_wait: Callable[[], None]) -> Generator[Any, Any, T]:
    """Await a coroutine in `context`; call `on_wait` once, before it first waits.

    Cancelling the task cancels the coroutine where it waits, as with a plain await.
    """
    run, send, throw = context.run, coroutine.send, coroutine.throw
    try:
        awaited = run(send, None)
        on_wait()
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
