"""`aiodelay delay-box`: takes requests from Kafka topics, keeps them in a store, and delivers them."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from aiodelay.errors import masked_url, missing_extra
from aiodelay.operations.text_log import log_as_text

from .signals import stop_signals

if TYPE_CHECKING:
    from aiodelay.delay_box import DelayBox

__all__ = ["delay_box"]

log: logging.Logger = logging.getLogger("aiodelay.cli")


def delay_box(
    *,
    source: Annotated[str, Parameter(name="--from")],
    store: str,
    allow: Annotated[list[str], Parameter(negative="")],
    countdown_from: Literal["record", "arrival"] = "record",
    dead_topic: str | None = None,
    begin_after: str | None = None,
    namespace: str = "default",
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"], negative="")] = False,
    verbose: Annotated[bool, Parameter(name=["--verbose", "-v"], negative="")] = False,
) -> None:
    """Take in what services ask for on Kafka topics, and deliver it when its countdown is over.

    A request is a record with the JSON value {"topic": "T", "message": "...", "countdown": 120}, seconds. Runs until
    SIGTERM or Ctrl-C; any number of boxes may share a store.

    Args:
        source: Where requests come from: kafka://host:9092/topic; ?create_topic=true creates it.
        store: URL of the store, such as redis://localhost, sqlite:///delay.db or kafka://host:9092/schedules.
        allow: A topic that messages may go to; may be repeated.
        countdown_from: Where a countdown begins: at the record's time, or at its arrival here.
        dead_topic: Where records go that cannot be read or are not allowed; without it, the topic's name and ".dead".
        begin_after: Consumer group of another system: where no position is stored yet, begin at what it has committed.
        namespace: Keeps several boxes in one store apart.
        quiet: Log warnings and errors only.
        verbose: Log also what aiodelay does in detail.
    """
    try:
        from aiodelay.delay_box import DelayBox  # noqa: PLC0415 - needs a client that other commands do not
    except ImportError as error:
        raise missing_extra(error, "delay-box", "kafka") from error
    log_as_text(logging.WARNING if quiet else logging.INFO)
    if verbose:
        logging.getLogger("aiodelay").setLevel(logging.DEBUG)
    box = DelayBox(
        store,
        source,
        allow=allow,
        countdown_from=countdown_from,
        dead_topic=dead_topic,
        begin_after=begin_after,
        namespace=namespace,
    )
    asyncio.run(_run(box, f"{masked_url(source)} into {masked_url(store)}"))


async def _run(box: DelayBox, what: str) -> None:
    with stop_signals() as stop:
        async with AsyncExitStack() as stack:
            if await stop.opens(stack, box):
                log.info("delaying from %s; SIGTERM or Ctrl-C ends it", what)
                await stop.wait()
                log.info("stopping; a later signal ends it at once")
    log.info("the delay box has stopped")
