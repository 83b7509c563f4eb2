"""Ctrl-C is recorded, not raised, while a job waits for its stream."""

from __future__ import annotations

import signal
import threading

import pytest

from aiodelay.spark.interrupts import noted_interrupts


def test_ctrl_c_is_noted_and_raises_again_afterwards() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with noted_interrupts() as interrupted:
            assert not interrupted.is_set()
            signal.raise_signal(signal.SIGINT)
            assert interrupted.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_in_another_thread_nothing_changes() -> None:
    found: list[object] = []

    def run() -> None:
        with noted_interrupts() as interrupted:
            found.extend((interrupted.is_set(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False, signal.getsignal(signal.SIGINT)]
