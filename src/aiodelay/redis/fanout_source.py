"""A topic's consumer as a source: `@scheduler.handler(source="redis-fanout:<topic>?consumer=<name>")`."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple
from urllib.parse import parse_qsl

from msgspec.structs import replace

from aiodelay.errors import StoreUnavailableError, TargetError, shortened
from aiodelay.model import Again, Claimed, Dead, Demand, Lane, PutBack, Stored
from aiodelay.ports import Feed
from aiodelay.transitions import after_failure
from aiodelay.urls import UrlOptions

from .client import Client
from .elements import encode_record_element
from .ends import Ending
from .fanout import NAME, Start, TopicKeys, check_name, register
from .faults import Fault
from .keys import DEFAULT_NAMESPACE, Keys, keys_of
from .options import Options, read_options
from .scripts import Arg
from .taking import Store, Taken, TakingFeed
from .waking import listening

__all__ = ["RedisFanoutSource", "open_fanout_source"]

log: logging.Logger = logging.getLogger("aiodelay.redis")

AGAIN_AT_ONCE = 100
_STARTS: Mapping[str, Start] = {"now": "now", "oldest": "oldest"}
_BOOLEANS = {"true": True, "false": False}
_FORM = "<topic>?consumer=<name>, with &from=oldest or &ordered=true if wanted"


class _Place(NamedTuple):
    """Whose messages a handler takes, and how it is registered."""

    topic: str
    consumer: str
    start: Start
    is_ordered: bool


def _read_place(address: str) -> _Place:
    topic, _, query = address.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    options = dict(given)
    is_twice = len(options) < len(given)
    consumer = options.pop("consumer", "")
    start, is_ordered = _STARTS.get(options.pop("from", "now")), _BOOLEANS.get(options.pop("ordered", "false"))
    if is_twice or options or start is None or is_ordered is None:
        raise TargetError(f"address of {NAME}", shortened(address), _FORM)
    check_name(topic, field=f"topic of {NAME}")
    check_name(consumer, field=f"consumer of {NAME}")
    return _Place(topic, consumer, start, is_ordered)


class RedisFanoutSource(Ending):
    """Takes the messages of a topic's consumer; all who name the same consumer share them.

    An address is `<topic>?consumer=<name>`. The consumer is registered when it first takes, to begin with what is
    published from then on, or with `&from=oldest` with what the topic keeps. With `&ordered=true` one message is in
    flight at a time, retries too, whoever takes it. What a process has taken is its own until its lease ends; then it
    returns to the head of the consumer's list. Retries return to the consumer, dead letters go to the scheduler's
    store.

    Args:
        server: A URL as of a Redis store.
        namespace: As of `RedisFanoutSink`.

    Raises:
        ConfigurationError: The URL or the namespace cannot be used.
    """

    name: str = NAME

    def __init__(self, server: str | Options, *, namespace: str = DEFAULT_NAMESPACE) -> None:
        super().__init__(server)
        self.keys: Keys = keys_of(namespace)

    def check(self, address: str) -> None:
        """Refuse an address that is not of the form `<topic>?consumer=<name>`."""
        _read_place(address)

    @asynccontextmanager
    async def feed(
        self,
        address: str,
        consumer: str,
        put_back: Callable[[Sequence[PutBack]], Awaitable[Sequence[Stored]]],
        now_ms: Callable[[], int],
    ) -> AsyncIterator[Feed]:
        """Open the taking of a consumer's messages; it is registered with the first claim."""
        assert self._client is not None
        feed = _FanoutFeed(
            self._client, self.options.name, self.keys, _read_place(address), consumer, store=(put_back, now_ms)
        )
        async with listening(feed.listener, f"aiodelay redis fan-out {address}"):
            yield feed


class _FanoutFeed(TakingFeed):
    """One process's taking of one consumer's messages.

    What a store keeps as a dead letter is addressed to this consumer alone, and has an id of its own: others may give
    up the same message.
    """

    def __init__(self, client: Client, server: str, keys: Keys, place: _Place, instance: str, *, store: Store) -> None:
        self._place, self._topic = place, TopicKeys(keys, place.topic)
        own = self._topic.of(place.consumer)
        super().__init__(
            client,
            f"consumer {place.consumer} of topic {place.topic} at {server}",
            [own.refs, own.instances, f"{own.taken}{instance}", self._topic.content],
            instance,
            store=store,
        )
        self._is_registered, self._is_unknown = False, False

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Take messages; with the first call the consumer is registered."""
        if not self._is_registered:
            place = self._place
            try:
                await register(self._client, self._topic, place.consumer, start=place.start, ordered=place.is_ordered)
            except Fault as fault:
                raise StoreUnavailableError(self._name, fault.reason) from fault
            self._is_registered = True
        return await super().claim(demand, request=request, lease_ms=lease_ms)

    def _note(self, why: bytes, missed: int) -> None:
        if why == b"u" and not self._is_unknown:
            log.warning("%s is not registered any more: it is given nothing", self._name)
        self._is_unknown = why == b"u"
        if missed > 0:
            log.warning("%s missed %d messages: the topic kept them no longer", self._name, missed)
            self._untold += missed

    async def _leave(self, pairs: Sequence[tuple[Again | Dead, Taken]]) -> tuple[list[int], set[int]]:
        """Have the consumer get again what is to be tried again; what is given up goes to the store."""
        again = [(why, taken) for why, taken in pairs if isinstance(why, Again)]
        settled: set[int] = set()
        for start in range(0, len(again), AGAIN_AT_ONCE):
            part = again[start : start + AGAIN_AT_ONCE]
            arguments: list[Arg] = []
            for why, taken in part:
                element = encode_record_element(after_failure(taken.record, why))
                arguments += [taken.number, max(why.due_ms - self._now_ms(), 0), element]
            letters = await self._run("again", *arguments)
            settled |= {taken.number for (_, taken), letter in zip(part, letters, strict=True) if letter == ord("s")}
        ended, _ = await super()._leave([(why, taken) for why, taken in pairs if isinstance(why, Dead)])
        return ended, settled

    def _kept(self, message: PutBack) -> PutBack:
        place, record = self._place, message.record
        own = f"@{place.consumer}"
        envelope = replace(
            record.envelope,
            id=record.id if record.id.endswith(own) else f"{record.id}{own}",
            lane=NAME,
            address=f"{place.topic}{own}",
        )
        return replace(message, record=replace(record, envelope=envelope))


def open_fanout_source(url: str) -> RedisFanoutSource:
    """Open `redis-fanout://host:6379/0?namespace=shop`; with TLS `rediss-fanout://`.

    Raises:
        ConfigurationError: The URL is not of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    namespace = given.text("namespace", DEFAULT_NAMESPACE)
    given.finish()
    return RedisFanoutSource(options, namespace=namespace)
