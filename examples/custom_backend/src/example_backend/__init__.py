"""A store and a sink for aiodelay, in a package of their own: `log:///folder` and `webhook://host`."""

from .sink import WebhookSink
from .store import LogStore

__all__ = ["LogStore", "WebhookSink"]
