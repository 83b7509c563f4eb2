"""The old import path of `aiodelay.core.urls`, kept for existing programs."""

from aiodelay.core.urls import UrlOptions

__all__ = ["UrlOptions"]
