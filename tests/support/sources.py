"""The base class of the tests' own sources."""

from __future__ import annotations

from typing import Self

__all__ = ["PlainSource"]


class PlainSource:
    """A source that takes any address, and needs no opening. A subclass has a name and `feed`."""

    def check(self, address: str) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None: ...
