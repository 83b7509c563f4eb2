"""`DelayedMessage`: gives the admin a row with a link, and a permission to see it. It has no table."""

from __future__ import annotations

from django.db import models

__all__ = ["DelayedMessage"]


class DelayedMessage(models.Model):
    """The messages of aiodelay, as the admin names them."""

    class Meta:
        """No table, no migration; the permission `aiodelay.view_delayedmessage`."""

        managed = False
        default_permissions: tuple[str, ...] = ("view",)
