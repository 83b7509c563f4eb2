"""`interleaved`: lets another thread run between two steps of a function, as happens to threads without the GIL."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import Thread
from types import FrameType, ModuleType
from typing import Any

__all__ = ["interleaved"]

PATIENCE_S = 0.02
"""Longest wait for the other thread, in seconds. It may wait for a lock that the function holds."""


def interleaved(
    function: Callable[[], object], other: Callable[[], object], *, before_step: int, inside: ModuleType
) -> bool:
    """Call a function. Before one of its steps, call the other function in a thread. Return False if there is no step.

    A step is one instruction of Python's virtual machine.

    Args:
        function: The function to call.
        other: The function that the thread calls.
        before_step: The number of the step, from 0; -1 = before the call. Begin with -1: from Python 3.13 on, a
            function has no visible steps in its first traced call.
        inside: Only the steps of this module's code count.
    """
    thread, steps = Thread(target=other), 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:  # noqa: ANN401 - a trace function, or None
        nonlocal steps
        del argument
        if frame.f_code.co_filename != inside.__file__:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            if steps == before_step:
                thread.start()
                thread.join(PATIENCE_S)
            steps += 1
        return trace

    if before_step < 0:
        thread.start()
        thread.join()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    if thread.ident is None:
        return False
    thread.join()
    return True
