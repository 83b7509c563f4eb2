"""The link from Django's admin to the page of aiodelay, if the setting `AIODELAY_PAGE` has its address."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.conf import settings
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponseRedirect
from django.urls import URLPattern, path

from .models import DelayedMessage

__all__ = ["PageLink"]


if TYPE_CHECKING:
    _Admin = admin.ModelAdmin[DelayedMessage]
else:
    _Admin = admin.ModelAdmin  # takes no type when it runs


class PageLink(_Admin):
    """A row of the admin's index. It leads to the page, and shows nothing of its own."""

    def get_urls(self) -> list[URLPattern]:
        """Return the one address of this row."""
        return [path("", self.admin_site.admin_view(self.changelist_view), name="aiodelay_delayedmessage_changelist")]

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """Return the one permission of this row."""
        return {"view": self.has_view_permission(request)}

    def changelist_view(self, request: HttpRequest, extra_context: object = None) -> HttpResponseRedirect:
        """Redirect a user who may see messages to the page.

        Raises:
            PermissionDenied: The user lacks the permission `aiodelay.view_delayedmessage`.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        return HttpResponseRedirect(settings.AIODELAY_PAGE)


if getattr(settings, "AIODELAY_PAGE", None):
    admin.site.register(DelayedMessage, PageLink)
