"""`AiodelayBackend`: Django's tasks are stored, run, retried and refused; the admin leads to the page."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.core.management import call_command
from django.test import RequestFactory, override_settings
from django.urls import path, resolve
from django.utils import timezone

from aiodelay import ConfigurationError, DeadLetter, Retry, Scheduler
from aiodelay.contrib.django.backend import AiodelayBackend, first_backend
from tests.support.django_project import (
    PAGE,
    set_up,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
    tasks_setting,
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    set_up(tmp_path_factory.mktemp("django"))
    from tests.support import django_tasks_of_shop  # noqa: PLC0415 - its decorators need the settings

    return django_tasks_of_shop


@pytest.fixture
def backend(shop: ModuleType, tmp_path: Path) -> Iterator[AiodelayBackend]:
    shop.RUNS.clear()
    with override_settings(TASKS=tasks_setting(tmp_path, retry=Retry(attempts=2, first="1ms"))):
        backend = first_backend()
        yield backend
        backend.blocking.close()


def run_all(backend: AiodelayBackend) -> list[DeadLetter]:
    """Run all tasks, and return those that were given up."""

    async def run() -> list[DeadLetter]:
        scheduler = Scheduler(backend.store, namespace=backend.namespace)
        backend.add_tasks(scheduler)
        async with scheduler:
            await scheduler.run_until_idle()
            return [letter async for letter in scheduler.dead_letters()]

    return asyncio.run(run())


# --- enqueue ----------------------------------------------------------------------------------------------


def test_a_task_waits_until_run_after(shop: ModuleType, backend: AiodelayBackend) -> None:
    run_after = (timezone.now() + timedelta(days=3)).replace(microsecond=0)
    result = shop.note.using(run_after=run_after).enqueue(7)
    assert result.status == "READY"
    assert result.enqueued_at is not None
    stored = backend.blocking.get(result.id)
    assert stored is not None
    assert stored.record.due_ms == run_after.timestamp() * 1000
    assert backend.blocking.cancel(result.id) == "cancelled"


def test_without_time_zones_run_after_is_a_local_time(shop: ModuleType, backend: AiodelayBackend) -> None:
    with override_settings(USE_TZ=False, TIME_ZONE="Asia/Tokyo"):
        result = shop.note.using(run_after=datetime(2026, 1, 1, 9)).enqueue()  # noqa: DTZ001
    stored = backend.blocking.get(result.id)
    assert stored is not None
    assert stored.record.due_ms == datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000


def test_asynchronous_code_enqueues(shop: ModuleType, backend: AiodelayBackend) -> None:
    result = asyncio.run(shop.note.aenqueue(7))
    assert backend.blocking.get(result.id) is not None


def test_all_threads_share_one_connection(shop: ModuleType, backend: AiodelayBackend) -> None:
    at_the_same_time = threading.Barrier(4)

    def enqueue(number: int) -> None:
        at_the_same_time.wait()
        shop.note.enqueue(number)

    before = len(connections())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enqueue, range(4)))
        assert len(connections()) == before + 1


def connections() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "aiodelay blocking"]


def test_a_receiver_that_raises_does_not_hide_a_stored_task(shop: ModuleType, backend: AiodelayBackend) -> None:
    ids: list[str] = []

    def watch(task_result: Any, **_: object) -> None:  # noqa: ANN401 - of either version of Django
        ids.append(task_result.id)
        raise ValueError("a receiver's own error")

    task_enqueued.connect(watch)
    try:
        result = shop.note.enqueue()
    finally:
        task_enqueued.disconnect(watch)
    assert ids == [result.id]


# --- run --------------------------------------------------------------------------------------------------


def test_plain_and_coroutine_tasks_run_with_their_arguments(shop: ModuleType, backend: AiodelayBackend) -> None:
    shop.note.enqueue(7, "x", deep={"a": [1, None]})
    shop.note_later.enqueue("by mail")
    results: list[Any] = []

    def watch(task_result: Any, **_: object) -> None:  # noqa: ANN401 - as above
        results.append((task_result.status, len(task_result.worker_ids), task_result.finished_at is not None))

    task_started.connect(watch)
    task_finished.connect(watch)
    try:
        assert run_all(backend) == []
    finally:
        task_started.disconnect(watch)
        task_finished.disconnect(watch)
    assert "by mail" in shop.RUNS
    ((args, kwargs, raw),) = [run for run in shop.RUNS if run != "by mail"]
    assert (args, kwargs) == ((7, "x"), {"deep": {"a": [1, None]}})
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):  # Django's connections end with the run
        raw.execute("SELECT 1")
    assert sorted(results) == [("RUNNING", 1, False)] * 2 + [("SUCCESSFUL", 1, True)] * 2


def test_a_task_that_raises_is_repeated_and_then_given_up(shop: ModuleType, backend: AiodelayBackend) -> None:
    finished: list[Any] = []

    def watch(task_result: Any, **_: object) -> None:  # noqa: ANN401 - as above
        finished.append(task_result)
        raise ValueError("a receiver's own error")

    task_finished.connect(watch)
    try:
        second, never = shop.fail.enqueue(until=2), shop.fail.enqueue(until=9)
        (letter,) = run_all(backend)
    finally:
        task_finished.disconnect(watch)
    assert sorted(shop.RUNS) == sorted([(second.id, 1), (second.id, 2), (never.id, 1), (never.id, 2)])
    assert letter.record.envelope.id == never.id
    assert letter.record.last_error == "OSError: no mail server"
    by_id = {result.id: result for result in finished}
    assert {by_id[second.id].status, by_id[never.id].status} == {"SUCCESSFUL", "FAILED"}
    assert len(finished) == 2
    assert by_id[never.id].errors[0].exception_class is OSError


@pytest.mark.parametrize(("of_its_type", "runs"), [(Retry.never(), 1), (Retry(attempts=3, first="1ms"), 3)])
def test_a_plan_for_a_type_of_error_decides_when_a_task_has_failed(
    shop: ModuleType, tmp_path: Path, of_its_type: Retry, runs: int
) -> None:
    finished: list[Any] = []

    def watch(task_result: Any, **_: object) -> None:  # noqa: ANN401 - as above
        finished.append((task_result.status, len(task_result.worker_ids)))

    retry = Retry(attempts=2, first="1ms", by_type={OSError: of_its_type})
    task_finished.connect(watch)
    try:
        with override_settings(TASKS=tasks_setting(tmp_path, retry=retry)), closing(first_backend().blocking):
            shop.fail.enqueue(until=9)
            assert len(run_all(first_backend())) == 1
    finally:
        task_finished.disconnect(watch)
    assert finished == [("FAILED", runs)]


# --- what is refused --------------------------------------------------------------------------------------


def test_what_the_backend_cannot_do_is_refused_in_words(shop: ModuleType, backend: AiodelayBackend) -> None:
    with pytest.raises(Exception, match="does not support setting priority"):
        shop.note.using(priority=5)
    with pytest.raises(NotImplementedError, match="does not support retrieving"):
        shop.note.get_result("x")
    with pytest.raises(TypeError, match="Unsupported type"):
        shop.note.enqueue(object())
    with pytest.raises(ConfigurationError, match=r"task is at tests.*\.bare is a function; allowed: .* with @task"):
        shop.hidden.enqueue()
    assert list(backend.blocking.pending()) == []


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"OPTIONS": {}}, "store is None; allowed: a URL"),
        ({"OPTIONS": {"store": "sqlite:///x.db", "retries": 3}}, r"OPTIONS is retries; allowed: store, namespace"),
        ({"QUEUES": []}, r"QUEUES is empty; allowed: names of queues"),
        ({"BACKEND": "aiodelay.contrib.django.backend.BaseTaskBackend"}, "abstract"),
    ],
)
def test_bad_settings_are_named(shop: ModuleType, tmp_path: Path, changed: dict[str, object], error: str) -> None:
    bad = {"default": tasks_setting(tmp_path)["default"] | changed}
    with override_settings(TASKS=bad), pytest.raises((ConfigurationError, TypeError), match=error):
        task_backends["default"]


def test_a_project_without_the_backend_is_told(shop: ModuleType) -> None:
    dummy = f"{task_backends.__class__.__module__}.backends.dummy.DummyBackend"
    with (
        override_settings(TASKS={"default": {"BACKEND": dummy}}),
        pytest.raises(ConfigurationError, match=r"TASKS is without such a backend; allowed: a BACKEND aiodelay\."),
    ):
        first_backend()


# --- the admin --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("may", ["aiodelay.change_other", "aiodelay.view_delayedmessage", "all"])
def test_the_admin_leads_those_who_may_see_messages_to_the_page(shop: ModuleType, may: str) -> None:
    admin.autodiscover()
    request: Any = RequestFactory().get("/admin/aiodelay/delayedmessage/")
    request.user = SimpleNamespace(
        is_active=True,
        is_staff=True,
        has_perm=lambda name, obj=None: may in (name, "all"),
        has_module_perms=lambda label: label == "aiodelay",
    )
    with override_settings(ROOT_URLCONF=(path("admin/", admin.site.urls),)):
        view = resolve(request.path).func
        shown = admin.site.get_app_list(request)
        rows = [(row["admin_url"], row["add_url"], row["view_only"]) for app in shown for row in app["models"]]
        if may != "aiodelay.change_other":
            assert rows == [(request.path, None, True)]
            answer = view(request)
            assert (answer.status_code, answer["Location"]) == (302, PAGE)
        else:
            assert rows == []
            with pytest.raises(PermissionDenied):
                view(request)


def test_the_application_needs_no_migration(shop: ModuleType) -> None:
    assert [model.__name__ for model in apps.get_app_config("aiodelay").get_models()] == ["DelayedMessage"]
    call_command("makemigrations", check_changes=True, dry_run=True, stdout=StringIO())
    call_command("check", tags=["models"], stderr=StringIO())
