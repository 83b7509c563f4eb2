"""`LogFeed`: takes the messages of one consumer of a log."""

from __future__ import annotations

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.wakeup_listener import LogListener
from aiodelay.backends.redis.fanout.topic_consumer import ConsumerFeed
from aiodelay.backends.redis.fanout.topic_scripts import Place
from aiodelay.backends.redis.lists.list_consumer import Store
from aiodelay.backends.redis.records.keys import Keys

from .entries import read_start
from .topics import LogKeys, register

__all__ = ["LogFeed"]


class LogFeed(ConsumerFeed):
    """Takes the messages of one consumer for one process.

    The messages that were given back to the consumer come first. The next entries of the log follow.

    Args:
        client: The client of the log's server.
        server: The name of the server in error messages.
        keys: The keys of the namespace.
        place: The topic and the consumer.
        instance: The name of this process among the processes of the consumer.
        sink: The name of the sink that sends a redriven dead letter to the consumer.
        store: Two functions of the scheduler's store, as for `ListConsumer`.
    """

    _scripts = {"take": "take_log", "drop": "drop_log", "again": "again_log"}  # noqa: RUF012 - shared, never changed

    def __init__(
        self, client: Client, server: str, keys: Keys, place: Place, instance: str, *, sink: str, store: Store
    ) -> None:
        self._log = LogKeys(keys, place.topic)
        own = self._log.of(place.consumer)
        scripted = [*own.of_instance(instance), self._log.entries]
        super().__init__(client, server, place, scripted, instance, sink=sink, store=store)
        self.ahead: LogListener = LogListener(client, self._log.entries, own.state, self._wakeup.set)

    async def _register(self) -> None:
        place = self._place
        start = read_start(place.start, field="from")
        await register(self._client, self._log, place.consumer, start=start, ordered=place.is_ordered)

    def _own_address(self) -> str:
        return f"{self._place.topic}?consumer={self._place.consumer}"

    def _ask(self) -> None:
        super()._ask()
        self.ahead.ask()
