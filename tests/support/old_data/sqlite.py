"""Old data of SQLite: a file that an old version wrote."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from shutil import copyfile
from typing import Any, ClassVar

from aiodelay.ports import Store
from aiodelay.sqlite import open_store
from aiodelay.testing.clock import VirtualClock
from aiodelay.testing.conformance import Stage

from .answers import OldData
from .story import FAR, JOURNAL, Told, tell

__all__ = ["OldSqlite", "rows_of"]

FILE, SHOP = "delay.db", "shop"
_COUNTERS = 4096
"""The last 12 bits of a token are a counter, which begins at a random number."""


class OldSqlite(OldData):
    """The file of an old version.

    Args:
        fixture: The folder with the file.
        here: A folder for its copies.
    """

    wakes_other_processes: ClassVar[bool] = True

    def __init__(self, fixture: Path, here: Path) -> None:
        self._fixture = fixture
        self.path: Path = here / FILE

    @property
    def url(self) -> str:
        """The URL of the copy."""
        return f"sqlite:///{self.path}"

    async def restore(self) -> None:
        """Copy the file, and delete the side files (WAL) of the copy before."""
        for each in self.path.parent.glob(f"{FILE}*"):
            each.unlink()
        copyfile(self._fixture / FILE, self.path)

    def make_store(self, clock: VirtualClock, *, journal: int = 0) -> Store:
        """Return a store on the copy."""
        return open_store(f"{self.url}?journal={journal}", namespace="default", clock=clock)

    async def write(self) -> Told:
        """Copy the file while the processes of the story have it open, as if they were killed."""
        async with Stage(self, journal=JOURNAL) as stage:
            told = await self.tell(stage)
            self.copy_to(self._fixture / FILE)
        return told

    async def tell(self, stage: Stage) -> Told:
        """Play the story, next to a message of another namespace."""
        async with self.shop() as shop:
            await shop.apply([stage.put("plain", FAR, payload=b"of the shop")])
        return await tell(stage)

    def shop(self) -> Store:
        """Return a store on another namespace of the copy."""
        return open_store(self.url, namespace=SHOP, clock=VirtualClock())

    def copy_to(self, path: Path) -> None:
        """Copy the file into the state that a clean close leaves."""
        with closing(sqlite3.connect(self.path)) as old, closing(sqlite3.connect(path)) as new:
            old.backup(new)


def rows_of(path: Path, *, without: Collection[str] = ()) -> Mapping[str, Sequence[tuple[Any, ...]]]:
    """Return the schema, and the rows of each table and of the view, without the counters in tokens.

    Args:
        path: The file.
        without: Columns to leave out.
    """
    with closing(sqlite3.connect(path)) as connection:
        schema = connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY name").fetchall()
        tables = [name for kind, name, _ in schema if kind == "table"] + ["schedule"]
        found = {name: _rows(connection, name, without) for name in tables}
        pragmas = [connection.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")]
    return found | {"schema": schema, "pragmas": pragmas}


def _rows(connection: sqlite3.Connection, table: str, without: Collection[str]) -> list[tuple[Any, ...]]:
    cursor = connection.execute(f"SELECT * FROM {table}")
    names = [name for name, *_ in cursor.description]
    rows = [
        tuple(
            value // _COUNTERS if name == "token" else value
            for name, value in zip(names, row, strict=True)
            if name not in without
        )
        for row in cursor
    ]
    return sorted(rows, key=str)
