"""`aiodelay run aiodelay.contrib.django.worker:scheduler` runs the tasks of the first `AiodelayBackend` in `TASKS`.

`manage.py aiodelay run` does so, too. Importing this module sets Django up, with the settings that the environment
variable `DJANGO_SETTINGS_MODULE` names.
"""

from __future__ import annotations

import django

from aiodelay import Scheduler

from .backend import first_backend

__all__ = ["scheduler"]

django.setup()
_backend = first_backend()
scheduler: Scheduler = Scheduler(_backend.store, namespace=_backend.namespace)
_backend.add_tasks(scheduler)
