"""Opens a store, a sink or a source by the scheme of its URL.

The schemes are the names of entry points. To add a scheme, a package registers an entry point in one of these groups:

- `aiodelay.stores`: `open_store(url, *, namespace, clock) -> Store`
- `aiodelay.sinks`: `open_sink(url) -> Sink`
- `aiodelay.sources`: `open_source(url) -> Source`
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Literal

from aiodelay.errors import ConfigurationError, kind_of, masked_url, missing_extra, shortened
from aiodelay.ports import Sink, Source, Store
from aiodelay.ports.clock import Clock
from aiodelay.ports.store import missing_members

__all__ = ["open_sink", "open_source", "open_store"]

_EXTRAS = {
    **dict.fromkeys(("rediss", "unix", "valkey", "valkeys"), "redis"),
    **dict.fromkeys(("redis-list", "rediss-list", "redis-fanout", "rediss-fanout", "redis-log", "rediss-log"), "redis"),
}
"""The extra to install for each scheme that is not itself the name of an extra."""

Group = Literal["aiodelay.stores", "aiodelay.sinks", "aiodelay.sources"]


def open_store(given: str | Store, *, namespace: str, clock: Clock | None) -> Store:
    """Return the given store, or create the store that a URL names. The call does not connect to anything.

    Raises:
        ConfigurationError: The scheme or an option is not known, or the store lacks methods of `Store`.
        MissingExtraError: The client library of the store is not installed.
    """
    if isinstance(given, str):
        store: Store = _load("aiodelay.stores", given)(given, namespace=namespace, clock=clock)
    elif hasattr(given, "apply") and hasattr(given, "traits"):
        store = given
    else:
        raise ConfigurationError("store", kind_of(given), "a URL such as 'sqlite:///delay.db', or a Store")
    if missing := missing_members(store):
        got = f"{kind_of(store)} without {', '.join(missing)}"
        raise ConfigurationError("store", got, "a class with every method of aiodelay.ports.Store")
    return store


def open_sink(given: str | Sink) -> Sink:
    """Return the given sink, or create the sink that a URL names. The call does not connect to anything.

    Raises:
        ConfigurationError: The scheme or an option is not known, or the object is not a sink.
        MissingExtraError: The client library of the sink is not installed.
    """
    if isinstance(given, str):
        sink: Sink = _load("aiodelay.sinks", given)(given)
        return sink
    if not hasattr(given, "send") or not isinstance(given.name, str):
        raise ConfigurationError("sinks", f"a collection with {kind_of(given)}", "URLs such as 'stdout:', and Sinks")
    return given


def open_source(given: str | Source) -> Source:
    """Return the given source, or create the source that a URL names. The call does not connect to anything.

    Raises:
        ConfigurationError: The scheme or an option is not known, or the object is not a source.
        MissingExtraError: The client library of the source is not installed.
    """
    if isinstance(given, str):
        source: Source = _load("aiodelay.sources", given)(given)
        return source
    if not hasattr(given, "feed") or not isinstance(given.name, str):
        raise ConfigurationError(
            "sources", f"a collection with {kind_of(given)}", "URLs such as 'redis-list://host', and Sources"
        )
    return given


def _load(group: Group, url: str) -> Any:  # noqa: ANN401 - the object of an entry point
    setting = group.removeprefix("aiodelay.").removesuffix("s")
    known = entry_points(group=group)
    schemes = ", ".join(f"{name}:" for name in sorted(known.names))
    scheme, colon, _ = url.partition(":")
    if not colon:
        raise ConfigurationError(setting, shortened(url), f"a URL that begins with one of {schemes}")
    if scheme not in known.names:
        raise ConfigurationError(f"scheme of {setting} {masked_url(url)}", shortened(scheme), schemes)
    point = known[scheme]
    try:
        return point.load()
    except ImportError as error:
        raise missing_extra(
            error, f"{setting} {masked_url(url)}", _EXTRAS.get(scheme.partition("+")[0], scheme.partition("+")[0])
        ) from error
