"""`aiodelay delay-box`: takes schedule requests from Kafka topics into a store, and delivers their messages."""

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
    """Take requests from Kafka topics, and deliver each message after its countdown.

    A request is a record whose value is JSON: {"topic": "T", "message": "...", "countdown": 120}. The countdown is in
    seconds. The command runs until SIGTERM or Ctrl-C. Any number of boxes may share a store.

    Args:
        source: The topics of the requests: kafka://host:9092/topic. ?create_topic=true creates missing topics.
        store: The URL of the store, such as redis://localhost, sqlite:///delay.db or kafka://host:9092/schedules.
        allow: A topic to which messages may go. May be repeated.
        countdown_from: The start of a countdown: the time of the record, or its arrival in the box.
        dead_topic: The topic for refused records: records that cannot be read, and records for topics that are not
            allowed. Default: the name of the request's topic with ".dead" at the end.
        begin_after: The consumer group of another system. If the store has no position of a partition yet, the box
            begins at the group's committed position.
        namespace: The namespace in the store. Boxes with different namespaces can share a store and stay apart.
        quiet: Log only warnings and errors.
        verbose: Also log details of aiodelay's work.
    """
    try:
        from aiodelay.delay_box import DelayBox  # noqa: PLC0415 - imports a client that only this command needs
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
                log.info("delaying from %s; SIGTERM or Ctrl-C ends the delay box", what)
                await stop.wait()
                log.info("the delay box is stopping; a later signal ends it at once")
    log.info("the delay box has stopped")
