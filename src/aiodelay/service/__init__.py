"""The service: stores with their schedulers, intakes, an HTTP API and a page, in one process.

Begin with `serve`, which runs the service, and `config`, which defines its settings.
"""

from __future__ import annotations

from aiodelay.errors import missing_extra as _missing_extra

try:
    from .api import ApiLimits, Tokens, admin, hash_token
    from .config import Token
except ImportError as _error:
    raise _missing_extra(_error, "aiodelay.service", "service") from _error

__all__ = ["ApiLimits", "Token", "Tokens", "admin", "hash_token"]
