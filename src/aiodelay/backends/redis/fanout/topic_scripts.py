"""Code that fan-out topics and logs share: checks of names, keys of a consumer, addresses of sources, `TopicEnd`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.connections import Connected
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.errors import ClosedError, StoreUnavailableError, TargetError, shortened

__all__ = ["NAMES", "ConsumerKeys", "Place", "TopicEnd", "check_name", "place_of", "read_place"]

NAMES = re.compile(r"[\w./-]{1,100}")
_BOOLEANS = {"true": True, "false": False}


def check_name(name: str, *, field: str) -> str:
    """Check the characters in the name of a topic or consumer. Return the name.

    Raises:
        TargetError: The name is not 1 to 100 letters, digits and `.`, `_`, `-`, `/`.
    """
    if not isinstance(name, str) or not NAMES.fullmatch(name):
        raise TargetError(field, shortened(name), "1 to 100 letters, digits and . _ - /")
    return name


def place_of(options: Options, keys: Keys) -> str:
    """Return the server and the namespace of topics, as the attribute `place` of their sinks and sources."""
    return f"{options.place}, namespace {keys.namespace!r}"


class ConsumerKeys:
    """The keys of one consumer of a topic. The keys of its instances begin with `taken`."""

    def __init__(self, prefix: str) -> None:
        self.refs: str = f"{prefix}refs"
        self.instances: str = f"{prefix}consumers"
        self.taken: str = f"{prefix}taken:"
        self.later: str = f"{prefix}later"
        self.state: str = f"{prefix}state"

    def of_instance(self, instance: str) -> list[str]:
        """Return the keys that an instance passes to the scripts which take messages."""
        return [self.refs, self.instances, f"{self.taken}{instance}"]


class Place(NamedTuple):
    """The parts of a source's address. The consumer is "" if the address names no consumer."""

    topic: str
    consumer: str
    start: str
    is_ordered: bool


def read_place(address: str, name: str, names: Mapping[str, str], *, start: str, form: str) -> Place:
    """Read an address of the form `<topic>?consumer=<name>&from=<start>&ordered=true`. Return its parts.

    Args:
        address: The address to read.
        name: The name of the sink or source in error messages.
        names: The allowed option names, each with its meaning: `consumer`, `from` or `ordered`. Two names may have the
            same meaning.
        start: The start for an address without `from`.
        form: The allowed form, for error messages.

    Raises:
        TargetError: The address does not have this form.
    """
    topic, _, query = address.partition("?")
    given = [(names.get(key, ""), value) for key, value in parse_qsl(query, keep_blank_values=True)]
    options = dict(given)
    ordered = _BOOLEANS.get(options.get("ordered", "false"))
    if len(options) < len(given) or "" in options or ordered is None:
        raise TargetError(f"address of {name}", shortened(address), form)
    check_name(topic, field=f"topic of {name}")
    consumer = options.get("consumer", "")
    if consumer or query:
        check_name(consumer, field=f"consumer of {name}")
    return Place(topic, consumer, options.get("from", start), ordered)


class TopicEnd(Connected):
    """Base class of the objects that inspect and change topics or logs.

    A failed call raises `StoreUnavailableError`.
    """

    def _opened(self) -> Client:
        if self._client is None:
            raise ClosedError(type(self).__name__, "not open")
        return self._client

    async def _run(self, script: str, keys: Sequence[str], arguments: Sequence[Arg]) -> Any:  # noqa: ANN401 - what the script returns
        try:
            return await self._opened().run_on(script, keys, arguments)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault

    async def _command(self, *arguments: Arg) -> Any:  # noqa: ANN401 - what the command returns
        try:
            return await self._opened().command(*arguments)
        except Fault as fault:
            raise StoreUnavailableError(self.options.name, fault.reason) from fault
