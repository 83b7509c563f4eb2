"""Which store a command works on: the options that all of them share."""

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
    """The store, the namespace, and how to write.

    Attributes:
        store: URL of the store, such as redis://localhost, sqlite:///delay.db or kafka://host:9092/schedules.
        namespace: Whose messages, in a store that several applications share.
        own: Take the topic's partitions while the command runs; on Kafka only their owner can look into them, so stop
            the service first.
        json: Write JSON, one object a line; errors likewise, on stderr.
    """

    store: Annotated[str | None, Parameter(env_var="AIODELAY_STORE")] = None
    namespace: Annotated[str, Parameter(env_var="AIODELAY_NAMESPACE")] = "default"
    own: Annotated[bool, Parameter(negative="")] = False
    json: Annotated[bool, Parameter(negative="")] = False

    @property
    def url(self) -> str:
        """Where the messages are.

        Raises:
            CommandError: Nobody said it.
        """
        if not self.store:
            raise CommandError("no store: give --store URL, or set AIODELAY_STORE", exit_code=NOT_UNDERSTOOD)
        return self.store

    @asynccontextmanager
    async def opened(
        self, sinks: Collection[str] = (), *, store: str | Store | None = None, may_create: bool = False
    ) -> AsyncIterator[Scheduler]:
        """Open the store; nothing is delivered from here.

        Args:
            sinks: URLs of what messages may go to, beside what the store brings along.
            store: Another than the one that was named.
            may_create: Make a file that is not there; to look for something in a new one is a mistake in its name.

        Raises:
            AiodelayError: It cannot be opened.
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
