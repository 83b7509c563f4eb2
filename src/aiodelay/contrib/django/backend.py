"""`AiodelayBackend`: Django's tasks, stored in an aiodelay store and run by a `Scheduler`.

Django 6.0 and later have `django.tasks`. Earlier versions need the package `django-tasks`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from traceback import format_exception
from typing import TYPE_CHECKING, Any, Final

import django
from django.db import close_old_connections
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

from aiodelay import ConfigurationError, Context, Scheduler
from aiodelay.blocking import BlockingScheduler
from aiodelay.errors import kind_of

if TYPE_CHECKING or django.VERSION < (6,):
    from django_tasks import task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django_tasks.signals import task_enqueued, task_finished, task_started
else:
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.base import Task, TaskContext, TaskError, TaskResult, TaskResultStatus
    from django.tasks.signals import task_enqueued, task_finished, task_started

__all__ = ["AiodelayBackend", "first_backend"]

OPTIONS: Final = ("store", "namespace", "concurrency", "retry")
_shared: dict[str, BlockingScheduler] = {}
"""The schedulers of this process, by store and namespace. Django makes a backend for each thread."""


class AiodelayBackend(BaseTaskBackend):
    """Stores tasks until they are due. `manage.py aiodelay run` runs them, at least once.

    In `TASKS`, `QUEUES` names the queues; each queue is an event type `django.<queue>`. `OPTIONS` has:

    - `store`: The URL of the store; required.
    - `namespace`: The namespace in the store; default: `default`.
    - `concurrency`: Most tasks of a queue that run at once in one process; default: 16.
    - `retry`: The `Retry` for tasks that raise; default: that of the scheduler.

    The id of a task's result is the id of its message. Results are not kept, and tasks have no priority.

    Raises:
        ConfigurationError: An option is wrong.
    """

    supports_defer = True
    supports_async_task = True

    store: str
    """The URL of the store."""
    namespace: str
    """The namespace in the store."""
    blocking: BlockingScheduler
    """Schedules the tasks. It can also cancel and reschedule them: `backend.blocking.cancel(result.id)`."""

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, dict(params))
        unknown = sorted(self.options.keys() - set(OPTIONS))
        if unknown:
            raise ConfigurationError(f"TASKS[{alias!r}] OPTIONS", ", ".join(unknown), ", ".join(OPTIONS))
        if not self.queues:
            raise ConfigurationError(f"TASKS[{alias!r}] QUEUES", "empty", "names of queues, such as ['default']")
        self.store, self.namespace = self.options.get("store"), self.options.get("namespace", "default")
        place = repr((self.store, self.namespace))
        if place not in _shared:
            _shared.setdefault(place, BlockingScheduler(self.store, namespace=self.namespace))
        self.blocking = _shared[place]

    def enqueue(self, task: Task[Any, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult[Any]:
        """Store a task until its `run_after`; without `run_after`, it is due now.

        Returns:
            A result with the status `READY`. Its id is the id of the message.

        Raises:
            InvalidTask: The backend cannot run the task, such as a task with a priority.
            ConfigurationError: A worker could not import the task.
            AiodelayError: The task was not stored, as in `BlockingScheduler.schedule`.
        """
        self.validate_task(task)
        _task_at(task.module_path)
        result = self._result(task, "", args, kwargs)
        payload = {"task": task.module_path, "queue": task.queue_name, "args": result.args, "kwargs": result.kwargs}
        due = task.run_after
        if due is not None and timezone.is_naive(due):  # allowed without USE_TZ
            due = timezone.make_aware(due)
        scheduled = self.blocking.schedule(
            json.dumps(payload).encode(),
            at=due,
            delay="0s" if due is None else None,
            to=f"handler:{_lane(task.queue_name)}",
        )
        _set(result, id=scheduled.id, enqueued_at=timezone.now())
        task_enqueued.send_robust(type(self), task_result=result)  # log a receiver's error: the task is stored
        return result

    def add_tasks(self, scheduler: Scheduler) -> None:
        """Let a scheduler run the tasks of all queues of this backend.

        Each run has a thread, in which the whole ORM works. A coroutine task runs on an event loop of this thread.

        Raises:
            ConfigurationError: `concurrency` or `retry` is wrong.
            DuplicateHandlerError: The scheduler runs tasks of a queue with this name already.
        """
        options = {name: self.options[name] for name in ("concurrency", "retry") if name in self.options}
        for queue in sorted(self.queues):
            scheduler.add_handler(self._run, name=_lane(queue), **options)

    def _run(self, payload: bytes, context: Context) -> None:
        sent = json.loads(payload)
        task = _task_at(sent["task"]).using(queue_name=sent["queue"], backend=self.alias)
        result = self._result(task, context.id, sent["args"], sent["kwargs"])
        started = timezone.now()
        _set(
            result,
            status=TaskResultStatus("RUNNING"),
            enqueued_at=context.scheduled_at,
            started_at=started,
            last_attempted_at=started,
            worker_ids=[get_random_string(32) for _ in range(context.attempt)],  # Django counts attempts by workers
        )
        close_old_connections()  # as at the begin and the end of a request
        try:
            task_started.send(type(self), task_result=result)
            first = (TaskContext(task_result=result),) if task.takes_context else ()
            returned = task.call(*first, *result.args, **result.kwargs)
        except Exception as error:
            if context.would_give_up(error):
                self._finish(result, TaskResultStatus("FAILED"), errors=[_error_of(error)])
            raise
        else:
            self._finish(result, TaskResultStatus("SUCCESSFUL"), _return_value=returned)
        finally:
            close_old_connections()

    def _finish(self, result: TaskResult[Any], status: TaskResultStatus, **more: object) -> None:
        _set(result, status=status, finished_at=timezone.now(), **more)
        task_finished.send_robust(type(self), task_result=result)  # a task that has succeeded must not run again

    def _result(
        self, task: Task[Any, Any], result_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TaskResult[Any]:
        return TaskResult(
            task=task,
            id=result_id,
            status=TaskResultStatus("READY"),
            enqueued_at=None,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )


def first_backend() -> AiodelayBackend:
    """Return the first backend of `TASKS` that is an `AiodelayBackend`.

    Raises:
        ConfigurationError: `TASKS` has no such backend.
    """
    for backend in task_backends.all():
        if isinstance(backend, AiodelayBackend):
            return backend
    raise ConfigurationError("TASKS", "without such a backend", f"a BACKEND {__name__}.{AiodelayBackend.__name__}")


def _task_at(path: str) -> Task[Any, Any]:
    """Import a task, as the worker does.

    Raises:
        ConfigurationError: There is no task at this path.
    """
    try:
        found = import_string(path)
    except ImportError as error:
        raise ConfigurationError("task", f"at {path} cannot be imported", "a task of a module") from error
    if not isinstance(found, Task):
        raise ConfigurationError("task", f"at {path} is {kind_of(found)}", "a function of a module, with @task")
    return found


def _lane(queue: str) -> str:
    return f"django.{queue}"


def _set(result: TaskResult[Any], **fields: object) -> None:
    """Change fields of a result, which is frozen. Django's own backends do so, too."""
    for name, value in fields.items():
        object.__setattr__(result, name, value)


def _error_of(error: Exception) -> TaskError:
    kind = type(error)
    return TaskError(
        exception_class_path=f"{kind.__module__}.{kind.__qualname__}", traceback="".join(format_exception(error))
    )
