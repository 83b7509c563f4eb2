"""The Django application, for `INSTALLED_APPS`."""

from __future__ import annotations

from django.apps import AppConfig

__all__ = ["AiodelayConfig"]


class AiodelayConfig(AppConfig):
    """`INSTALLED_APPS += ["aiodelay.contrib.django"]`."""

    name = "aiodelay.contrib.django"
    label = "aiodelay"
    verbose_name: str = "aiodelay"
    default_auto_field: str = "django.db.models.BigAutoField"
