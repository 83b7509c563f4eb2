"""`PassingStore`: the base of test stores that change one thing about another store, and pass everything else on."""

from __future__ import annotations

from typing import Any, Self

from aiodelay.ports import Store

__all__ = ["PassingStore"]


class PassingStore:
    """Passes all calls and attributes on to another store, unless a subclass defines them.

    Args:
        store: The other store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an attribute of any type
        return getattr(self._store, name)

    async def __aenter__(self) -> Self:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._store.__aexit__(*exc_info)
