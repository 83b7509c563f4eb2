"""An example package with a store and a sink for aiodelay: `log:///folder` and `webhook://host`."""

from .sink import WebhookSink
from .store import LogStore

__all__ = ["LogStore", "WebhookSink"]
