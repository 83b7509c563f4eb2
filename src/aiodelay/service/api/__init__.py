"""The HTTP API over one or several schedulers.

Begin with `application`, which builds the app from its routes. `models` holds the bodies of requests and answers.
"""

from __future__ import annotations

from .application import admin
from .security import ApiLimits, Tokens, hash_token

__all__ = ["ApiLimits", "Tokens", "admin", "hash_token"]
