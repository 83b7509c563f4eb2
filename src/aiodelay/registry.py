"""Stores and sinks by URL scheme, through entry points: another package adds one by registering it.

A store's entry point (group `aiodelay.stores`) is `open_store(url, *, namespace, clock) -> Store`; a sink's (group
`aiodelay.sinks`) is `open_sink(url) -> Sink`. The name is the URL's scheme.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any, Literal

from .clock import Clock
from .errors import ConfigurationError, MissingExtraError, masked_url, shortened
from .ports import Sink, Store

__all__ = ["open_sink", "open_store"]

Group = Literal["aiodelay.stores", "aiodelay.sinks"]


def open_store(url: str, *, namespace: str, clock: Clock | None) -> Store:
    """Make the store that a URL names; nothing is connected yet.

    Raises:
        ConfigurationError: The scheme or an option is not known.
        MissingExtraError: Its client library is not installed.
    """
    store: Store = _load("aiodelay.stores", url)(url, namespace=namespace, clock=clock)
    return store


def open_sink(url: str) -> Sink:
    """Make the sink that a URL names; nothing is connected yet.

    Raises:
        ConfigurationError: The scheme or an option is not known.
        MissingExtraError: Its client library is not installed.
    """
    sink: Sink = _load("aiodelay.sinks", url)(url)
    return sink


def _load(group: Group, url: object) -> Any:  # noqa: ANN401 - what an entry point names
    setting = "store" if group == "aiodelay.stores" else "sink"
    if not isinstance(url, str):
        raise ConfigurationError(setting, f"a {type(url).__qualname__}", f"a URL, or a {setting.capitalize()}")
    scheme = url.split(":", 1)[0]
    known = entry_points(group=group)
    if scheme not in known.names or ":" not in url:
        schemes = ", ".join(f"{name}:" for name in sorted(known.names))
        shown = masked_url(url) if ":" in url else shortened(url)
        raise ConfigurationError(f"scheme of {setting} {shown}", repr(scheme), schemes)
    point = known[scheme]
    try:
        return point.load()
    except ImportError as error:
        extra = f"pip install 'aiodelay[{scheme}]'"
        raise MissingExtraError(f"{setting} {masked_url(url)}", f"missing {error.name}", extra) from error
