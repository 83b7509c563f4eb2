"""Old path of `aiodelay.core.urls`, which goes on working."""

from aiodelay.core.urls import UrlOptions

__all__ = ["UrlOptions"]
