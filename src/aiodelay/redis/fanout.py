"""Topics that fan out, as a sink: `to="redis-fanout:<topic>"`, or `redis-fanout:<topic>@<consumer>` for one of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from aiodelay.errors import ConfigurationError, TargetError, shortened
from aiodelay.model import MAX_CLAIM_BYTES, Delivery, Failed, NotTaken, SendOutcome, Sent
from aiodelay.timeunits import Duration, parse_duration
from aiodelay.urls import UrlOptions

from .client import Client
from .elements import encode_element
from .ends import SendingEnd
from .faults import Fault
from .keys import DEFAULT_NAMESPACE, Keys, keys_of
from .options import Options, read_options
from .scripts import Arg

__all__ = [
    "ConsumerKeys",
    "RedisFanoutSink",
    "Start",
    "TopicKeys",
    "check_name",
    "open_fanout_sink",
    "register",
    "split_address",
]

NAME = "redis-fanout"
Start: TypeAlias = Literal["now", "oldest"]
"""Whether a consumer begins with what is published from now on, or with what the topic keeps."""
MOST_MESSAGES, MOST_INLINE = 1 << 40, 500
REMEMBERED_S = 540.0
"""A minute less than a topic remembers what was published from elsewhere."""
MOST_UNKNOWN = 10_000
_NAME = re.compile(r"[\w./-]{1,100}")
_FORM = "<topic>, or <topic>@<consumer>; names of 1 to 100 letters, digits and . _ - /"


def check_name(name: str, *, field: str) -> str:
    """Return the name of a topic or consumer.

    Raises:
        TargetError: It is not 1 to 100 letters, digits and `.`, `_`, `-`, `/`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise TargetError(field, shortened(name), "1 to 100 letters, digits and . _ - /")
    return name


class TopicKeys:
    """The keys of one topic."""

    def __init__(self, keys: Keys, topic: str) -> None:
        self.prefix: str = keys.key(f"fanout:{topic}")
        self.topics: str = keys.key("fanout:topics")
        self.content: str = f"{self.prefix}:content"
        self.consumers: str = f"{self.prefix}:consumers"
        self.meta: str = f"{self.prefix}:meta"

    def of(self, consumer: str) -> ConsumerKeys:
        """Return the keys of one consumer."""
        return ConsumerKeys(f"{self.prefix}@{consumer}:")


class ConsumerKeys:
    """The keys of one consumer of a topic; `taken` is how those of its instances begin."""

    def __init__(self, prefix: str) -> None:
        self.refs: str = f"{prefix}refs"
        self.instances: str = f"{prefix}consumers"
        self.taken: str = f"{prefix}taken:"
        self.later: str = f"{prefix}later"
        self.state: str = f"{prefix}state"


async def register(client: Client, topic: TopicKeys, consumer: str, *, start: Start, ordered: bool) -> bool:
    """Make a consumer known; say whether it was not.

    Raises:
        ConfigurationError: The topic has as many consumers as may be.
        Fault: The server did not answer; repeating is safe.
    """
    is_new = False
    while True:
        answer = await client.run_on("register", [topic.content, topic.topics], ["", consumer, int(ordered), start])
        if answer == b"full":
            raise ConfigurationError("consumers of a topic", f"one more: {shortened(consumer)}", "2,000")
        is_new = is_new or answer != b"known"
        if answer != b"more":
            return is_new


def split_address(address: str) -> tuple[str, str]:
    """Return an address's topic and consumer, "" = all.

    Raises:
        TargetError: It is not of the form `<topic>` or `<topic>@<consumer>`.
    """
    topic, at, consumer = address.partition("@")
    if not _NAME.fullmatch(topic) or (at and not _NAME.fullmatch(consumer)):
        raise TargetError(f"address of {NAME}", shortened(address), _FORM)
    return topic, consumer


class RedisFanoutSink(SendingEnd):
    """Publishes messages to all consumers that are registered with a topic, or to one of them.

    A Redis store brings one for its own namespace along, and moves messages there exactly once. From any other store
    they are claimed, published and settled; a message that is published again within 10 minutes is not given to anybody
    twice.

    Args:
        server: A URL as of a Redis store: `redis://user:password@host:6379/0`.
        namespace: Keeps the topics of several applications apart, as a store's.
        max_messages: Of so many that some consumer has not settled, the oldest are dropped; 0 = none are.
        max_age: What is older than that when the next message is published is dropped; None = nothing is.
        resend_unknown: Publish a message again also where the outcome of its first try has been unknown for more than 9
            minutes, though it may be doubled; otherwise it is given up as `outcome_unknown`.
        inline_below: A message that takes fewer bytes, about 100 beside its payload, is not kept once but given to each
            consumer itself; 0 to 500.

    Raises:
        ConfigurationError: The URL or an option cannot be used.
    """

    name: str = NAME

    def __init__(
        self,
        server: str | Options,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        max_messages: int = 0,
        max_age: Duration | None = None,
        inline_below: int = 0,
        resend_unknown: bool = False,
    ) -> None:
        for option, value, most in (
            ("max_messages", max_messages, MOST_MESSAGES),
            ("inline_below", inline_below, MOST_INLINE),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
                raise ConfigurationError(option, shortened(value), f"an integer from 0 to {most}")
        super().__init__(server)
        self.keys: Keys = keys_of(namespace)
        self.max_messages: int = max_messages
        self.max_age_ms: int = (
            0 if max_age is None else parse_duration(max_age, field="max_age", error=ConfigurationError, least_ms=1)
        )
        self.inline_below: int = inline_below
        self._resends_unknown = resend_unknown
        self._unknown: dict[str, float] = {}

    def check(self, address: str) -> None:
        """Refuse an address that is not of the form `<topic>` or `<topic>@<consumer>`."""
        split_address(address)

    @property
    def settings(self) -> tuple[int, int, int]:
        """What every publishing is told: most messages, their age in ms, what is given to each consumer itself."""
        return self.max_messages, self.max_age_ms, self.inline_below

    async def _pushed(self, client: Client, address: str, deliveries: Sequence[Delivery]) -> Sequence[SendOutcome]:
        topic, consumer = split_address(address)
        content = TopicKeys(self.keys, topic).content
        given_up = {} if self._resends_unknown else self._given_up(deliveries)
        left = [each for each in deliveries if each.delivery_id not in given_up]
        outcomes: dict[str, SendOutcome] = {**given_up}
        while left:
            part = _first_of(left)
            elements: list[Arg] = [value for each, element in part for value in (each.delivery_id, element)]
            try:
                published = await client.run_on("publish", [content], ["", consumer, *self.settings, *elements])
            except Fault as fault:
                if fault.kind == "unknown":
                    self._note_unknown(each for each, _ in part)
                raise
            if isinstance(published, bytes):
                refused = NotTaken(published.decode("utf-8", "backslashreplace"))
                outcomes |= {each.delivery_id: refused for each in left}
                break
            for each in left[: int(published)]:
                outcomes[each.delivery_id] = Sent()
                self._unknown.pop(each.delivery_id, None)
            left = left[int(published) :]
        return [outcomes[each.delivery_id] for each in deliveries]

    def _note_unknown(self, deliveries: Iterable[Delivery]) -> None:
        now_s = asyncio.get_running_loop().time()
        for each in deliveries:
            self._unknown.setdefault(each.delivery_id, now_s)
        while len(self._unknown) > MOST_UNKNOWN:  # others have sent them
            del self._unknown[next(iter(self._unknown))]

    def _given_up(self, deliveries: Sequence[Delivery]) -> Mapping[str, SendOutcome]:
        """Return those whose first try the topic may have forgotten, so that another may double them."""
        before_s = asyncio.get_running_loop().time() - REMEMBERED_S
        error = f"whether it was published has been unknown for more than {REMEMBERED_S:.0f} s"
        failed = Failed(error, retryable=False, reason="outcome_unknown")
        return {
            each.delivery_id: failed for each in deliveries if self._unknown.get(each.delivery_id, before_s) < before_s
        }


def _first_of(deliveries: Sequence[Delivery]) -> list[tuple[Delivery, bytes]]:
    """Return the first deliveries with their elements, as many as one call may carry."""
    found: list[tuple[Delivery, bytes]] = []
    size = 0
    for each in deliveries:
        element = encode_element(each)
        size += len(element)
        if found and size > MAX_CLAIM_BYTES:
            break
        found.append((each, element))
    return found


def open_fanout_sink(url: str) -> RedisFanoutSink:
    """Open `redis-fanout://host:6379/0?namespace=shop&max_messages=1000000&max_age=7d`; with TLS `rediss-fanout://`.

    Raises:
        ConfigurationError: The URL is not of these forms, or an option is unknown or out of range.
    """
    given = UrlOptions(url)
    options = read_options(given)
    namespace = given.text("namespace", DEFAULT_NAMESPACE)
    max_messages = given.integer("max_messages", 0, 0, MOST_MESSAGES)
    max_age = given.text("max_age")
    inline_below = given.integer("inline_below", 0, 0, MOST_INLINE)
    resend_unknown = given.integer("resend_unknown", 0, 0, 1) == 1
    given.finish()
    return RedisFanoutSink(
        options,
        namespace=namespace,
        max_messages=max_messages,
        max_age=max_age or None,
        inline_below=inline_below,
        resend_unknown=resend_unknown,
    )
