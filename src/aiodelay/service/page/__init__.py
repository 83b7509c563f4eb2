"""The page for operators: HTML made on the server, the same app and rights as the API beside it.

Begin with `application`, which puts the screens together, and `state`, which they share.
"""

from __future__ import annotations

from .application import install_page

__all__ = ["install_page"]
