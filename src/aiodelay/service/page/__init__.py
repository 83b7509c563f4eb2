"""The page for operators: HTML made on the server, in the app of the API and with the same rights.

Begin with `application`, which lists the screens, and `state`, which the screens share.
"""

from __future__ import annotations

from .application import install_page

__all__ = ["install_page"]
