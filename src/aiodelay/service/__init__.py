"""The service: stores with their schedulers, intakes and an HTTP API in one process, for people who run it."""

from __future__ import annotations

from .api import ApiLimits, Tokens, admin, hash_token
from .config import Token

__all__ = ["ApiLimits", "Token", "Tokens", "admin", "hash_token"]
