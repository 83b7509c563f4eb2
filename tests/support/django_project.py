"""The settings of Django in this process, which can be set only once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import django
from django.conf import settings

if TYPE_CHECKING or django.VERSION < (6,):
    from django_tasks import TaskContext, task, task_backends
    from django_tasks.signals import task_enqueued, task_finished, task_started
else:
    from django.tasks import TaskContext, task, task_backends
    from django.tasks.signals import task_enqueued, task_finished, task_started

__all__ = [
    "PAGE",
    "TaskContext",
    "set_up",
    "task",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
    "tasks_setting",
]

PAGE = "https://delays.example.com/"


def set_up(folder: Path) -> None:
    """Set Django up, if no earlier test of this process has done so.

    Args:
        folder: The folder of the database and of the store of tasks.
    """
    if settings.configured:
        return
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": folder / "shop.db", "OPTIONS": {"timeout": 30}}
    settings.configure(
        DATABASES={"default": database},
        ALLOWED_HOSTS=["*"],
        ROOT_URLCONF=(),
        LOGGING_CONFIG=None,
        SECRET_KEY="of the tests",
        USE_TZ=True,
        INSTALLED_APPS=[f"django.contrib.{app}" for app in ("admin", "auth", "contenttypes")]
        + ["aiodelay.contrib.django"],
        TASKS=tasks_setting(folder),
        AIODELAY_PAGE=PAGE,
    )
    django.setup()


def tasks_setting(folder: Path, **options: object) -> dict[str, Any]:
    """Return the setting `TASKS` with a store in this folder."""
    return {
        "default": {
            "BACKEND": "aiodelay.contrib.django.backend.AiodelayBackend",
            "QUEUES": ["default", "mail"],
            "OPTIONS": {"store": f"sqlite:///{folder}/tasks.db", **options},
        }
    }
