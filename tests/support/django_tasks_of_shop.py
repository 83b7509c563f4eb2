"""Tasks of a Django project. Import this module after `django_project.set_up`."""

from __future__ import annotations

from typing import Any

from django.db import connection

from tests.support.django_project import TaskContext, task

RUNS: list[object] = []


@task
def note(*args: Any, **kwargs: Any) -> str:  # noqa: ANN401 - any JSON
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    RUNS.append((args, kwargs, connection.connection))
    return "noted"


@task(queue_name="mail")
async def note_later(text: str) -> None:
    RUNS.append(text)


@task(takes_context=True)
def fail(context: TaskContext, until: int) -> None:
    RUNS.append((context.task_result.id, context.attempt))
    if context.attempt < until:
        raise OSError("no mail server")


def bare() -> None: ...


hidden = task(bare)
