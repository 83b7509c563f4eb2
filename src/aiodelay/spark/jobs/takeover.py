"""Migration from another scheduler, which must be stopped: import all pending messages of that scheduler."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from aiodelay.errors import UnsupportedByStoreError
from aiodelay.importers.fred84 import import_fred84
from aiodelay.importers.put_all import Imported
from aiodelay.ports import Store
from aiodelay.ports.clock import SystemClock
from aiodelay.spark.moving import Place
from aiodelay.spark.options import store_url
from aiodelay.spark.summary import Summary

from .settings_origin import run_coroutine

__all__ = ["SOURCES", "run"]

ETF1, FRED84 = "etf1+", "fred84+"
SOURCES: Final = (ETF1, FRED84)
"""The beginnings of URLs of other schedulers."""


def run(*, source: str, target: str, to_namespace: str = "default", verify: bool = False) -> Summary:
    """Store the pending messages of another scheduler, and remove nothing there. The job may be repeated.

    Args:
        source: `etf1+kafka://host:9092/schedules` or `fred84+redis://host?prefix=de_`; or `env:NAME` or `file:PATH`
            with such a URL.
        target: URL of a Redis or SQLite store; or `env:NAME` or `file:PATH` with such a URL.
        to_namespace: The namespace of the messages in the store.
        verify: Read the source again, and check that the store knows all messages.

    Returns:
        `rejected`: messages that cannot be imported, and with `verify` messages that the store did not know. `facts`
        has the reasons.

    Raises:
        ConfigurationError: A URL is wrong.
        UnsupportedByStoreError: The target is not a Redis or SQLite store.
        StoreUnavailableError: The source or the target does not answer. Repeat the job.
    """
    clock = SystemClock()
    started_ms = clock.monotonic_ms()
    place = Place(target, to_namespace)
    if (opened := place.store()).traits.conflicts.isdisjoint({"newer"}):
        raise UnsupportedByStoreError(
            "target of a takeover from another scheduler",
            opened.name,
            "redis: or sqlite:; from there, you can migrate to another store",
        )
    first, again = run_coroutine(_taken_over(store_url(source), place, verify=verify))
    missing = 0 if again is None else again.stored
    return Summary(
        job="migrate",
        seconds=(clock.monotonic_ms() - started_ms) / 1000,
        rows=first.stored + first.known + len(first.skipped),
        rejected=len(first.skipped) + missing,
        counts={"stored": first.stored, "known": first.known, "skipped": len(first.skipped)}
        | ({} if again is None else {"same": again.known, "missing": missing}),
        facts={"skipped": first.skipped, "verified": verify},
    )


async def _taken_over(source: str, place: Place, *, verify: bool) -> tuple[Imported, Imported | None]:
    async with place.store() as store:
        first = await _imported(source, store)
        return first, await _imported(source, store) if verify else None


async def _imported(source: str, store: Store) -> Imported:
    if source.startswith(ETF1):
        from aiodelay.importers.etf1 import import_etf1  # noqa: PLC0415 - Kafka's client may not be installed

        return await import_etf1(source.removeprefix(ETF1), store)
    url, prefix = _split(source.removeprefix(FRED84))
    return await import_fred84(url, store, prefix=prefix)


def _split(url: str) -> tuple[str, str]:
    """Return the URL without its option `prefix`, and the prefix of the keys."""
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    prefix = options.pop("prefix", "de_")
    return urlunsplit(parts._replace(query=urlencode(options))), prefix
