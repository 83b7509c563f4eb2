"""`Place`: the options that name the store of a command. All commands that use a store share them."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from aiodelay import Scheduler, StoreUnavailableError
from aiodelay.operations.text_log import log_as_text
from aiodelay.ports import Store

from .errors import NOT_UNDERSTOOD, CommandError

__all__ = ["Place"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The store, the namespace, and the form of the output.

    Attributes:
        store: The URL of the store, such as redis://localhost, sqlite:///delay.db or kafka://host:9092/schedules.
        namespace: The namespace, if several applications share the store.
        own: On Kafka, own the partitions of the topic while the command runs. Only the owner of a partition can inspect
            its messages, so stop the service first.
        json: Write JSON, one object per line. Errors are JSON too, on stderr.
    """

    store: Annotated[str | None, Parameter(env_var="AIODELAY_STORE")] = None
    namespace: Annotated[str, Parameter(env_var="AIODELAY_NAMESPACE")] = "default"
    own: Annotated[bool, Parameter(negative="")] = False
    json: Annotated[bool, Parameter(negative="")] = False

    @property
    def url(self) -> str:
        """The URL of the store.

        Raises:
            CommandError: Neither --store nor AIODELAY_STORE is set.
        """
        if not self.store:
            raise CommandError("no store: give --store URL, or set AIODELAY_STORE", exit_code=NOT_UNDERSTOOD)
        return self.store

    @asynccontextmanager
    async def opened(
        self, sinks: Collection[str] = (), *, store: str | Store | None = None, may_create: bool = False
    ) -> AsyncIterator[Scheduler]:
        """Open the store for a command, without delivering messages.

        Args:
            sinks: URLs of sinks to which messages may go, in addition to the sinks of the store.
            store: The store to open, instead of the store in the options.
            may_create: Create a SQLite file that does not exist. Commands that only inspect a store do not create a
                file: if the file is missing, its name is probably wrong.

        Raises:
            AiodelayError: The store cannot be opened.
        """
        log_as_text(logging.WARNING, "aiodelay: %(message)s")
        lanes: tuple[str, ...] | None = () if self.own else None
        store = self.url if store is None else store
        scheduler = Scheduler(
            store, namespace=self.namespace, sinks=sinks, dispatch=self.own, lanes=lanes, open_timeout="0s"
        )
        if not may_create:
            _check_there(scheduler.store)
        async with scheduler:
            yield scheduler


def _check_there(store: Store) -> None:
    from aiodelay.backends.sqlite import SqliteStore  # noqa: PLC0415 - `--help` loads no backend

    if isinstance(store, SqliteStore) and not os.path.exists(store.path):
        raise StoreUnavailableError(store.name, f"no such file: {store.path}")
