"""A sink that fails as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from aiodelay import SinkUnavailableError
from aiodelay.core.values import Delivery, Demand, Failed, SendOutcome, Sent

__all__ = ["BadSink"]


class BadSink:
    """A sink that is slow, down, or broken by a message. Tests may change `name` before a scheduler uses the sink."""

    name = "bad"
    limits = Demand(20)

    def __init__(self) -> None:
        self.takes_s = 0.0
        self.is_down = False
        self.breaks_at = ""
        self.refuses = ""
        self.sends = 0
        self.taken: list[Delivery] = []

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        self.sends += 1
        await asyncio.sleep(self.takes_s)
        if self.is_down:
            raise SinkUnavailableError(self.name, "connection refused")
        if any(each.envelope.id == self.breaks_at for each in deliveries):
            raise ValueError("this one breaks me")
        self.taken += [each for each in deliveries if each.envelope.id != self.refuses]
        return [Failed("not this one") if each.envelope.id == self.refuses else Sent() for each in deliveries]
