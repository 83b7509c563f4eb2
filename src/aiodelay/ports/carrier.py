"""`Carrier`: carries out the commands of a scheduler.

The engine's `CommandSender` implements it, and so does the telemetry's wrapper of a `CommandSender`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aiodelay.core.values import Command, Refused, Stored
from aiodelay.errors import AiodelayError

__all__ = ["Carrier"]


class Carrier(Protocol):
    """An object that carries commands out."""

    async def carry_out(self, command: Command, size: int) -> Stored | Refused:
        """Carry out one command. Raise if its outcome is an error."""
        ...

    async def carry_out_many(
        self, commands: Sequence[Command], size: int
    ) -> Sequence[Stored | Refused | AiodelayError]:
        """Carry out a batch of commands; return an answer or an error for each, in order."""
        ...
