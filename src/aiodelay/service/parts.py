"""Makes schedulers, sinks, delay boxes and the API from the settings, without opening them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI

from aiodelay.backends import registry
from aiodelay.core.validation import Targets
from aiodelay.errors import ConfigurationError
from aiodelay.ports import Guarded, Sink
from aiodelay.scheduler import Scheduler

from .api import ApiLimits, Tokens, admin
from .config import Intake, Settings, StoreSettings

if TYPE_CHECKING:
    from aiodelay.delay_box import DelayBox

__all__ = ["KAFKA", "default_topics", "make_api", "make_box", "make_scheduler", "store_of"]

KAFKA = "kafka:"


def make_scheduler(settings: Settings, store: StoreSettings) -> Scheduler:
    """Return the scheduler of a store.

    Raises:
        ConfigurationError: The settings of the store or of a sink cannot be used.
    """
    assert store.namespace is not None
    opened = registry.open_store(store.url, namespace=store.namespace, clock=None)
    if isinstance(opened, Guarded):
        opened.guard(Targets(store.allowed_targets).check)
    return Scheduler(
        opened,
        namespace=store.namespace,
        sinks=[_named_sink(name, sink.url) for name, sink in settings.sinks.items()],
        allowed_targets=store.allowed_targets,
        max_payload=settings.limits.max_payload,
        drain=settings.limits.drain,
        open_timeout=settings.limits.open_timeout,
        overdue_alarm=settings.limits.overdue,
    )


def _named_sink(name: str, url: str) -> Sink:
    sink: Any = registry.open_sink(url)
    if sink.name != name:
        sink.name = name
    return sink  # type: ignore[no-any-return]


def make_box(settings: Settings, intake: Intake, schedulers: Mapping[str, Scheduler]) -> DelayBox:
    """Return the delay box of an intake.

    Raises:
        ConfigurationError: The settings of the intake cannot be used.
    """
    from aiodelay.delay_box import DelayBox  # noqa: PLC0415 - imports a client that only an intake needs

    name = store_of(settings, intake)
    allow = default_topics(settings.named_stores[name]) if intake.allow is None else intake.allow
    return DelayBox(
        schedulers[name],
        intake.from_,
        allow=allow,
        countdown_from=intake.countdown_from,
        dead_topic=intake.dead_topic,
        begin_after=intake.begin_after,
        max_payload=settings.limits.max_payload,
    )


def make_api(settings: Settings, schedulers: Mapping[str, Scheduler], tokens: Tokens) -> FastAPI:
    """Return the app that serves the page and the HTTP API."""
    api = settings.api
    limits = ApiLimits(
        max_body=api.max_body,
        body_timeout_s=api.body_timeout.total_seconds(),
        max_page=api.max_page,
        rate=api.rate,
        burst=max(2 * api.rate, 1),
    )
    return admin(schedulers, tokens=tokens, read_only=api.read_only, limits=limits, environment=api.environment)


def store_of(settings: Settings, intake: Intake) -> str:
    """Return the name of the store into which an intake schedules.

    Raises:
        ConfigurationError: There is no store of that name; or there are several stores and the intake names none.
    """
    names = list(settings.named_stores)
    if intake.store is None and len(names) == 1:
        return names[0]
    if intake.store not in names:
        raise ConfigurationError("store", repr(intake.store) if intake.store else "missing", ", ".join(names))
    return intake.store


def default_topics(store: StoreSettings) -> list[str]:
    """Return the Kafka topics that a store's `allowed_targets` name one by one, without `*`."""
    targets = store.allowed_targets or ()
    return [to.removeprefix(KAFKA) for to in targets if to.startswith(KAFKA) and not to.endswith("*")]
