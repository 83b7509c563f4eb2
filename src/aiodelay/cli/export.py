"""`aiodelay export`: writes the pauses, messages and dead letters of a store as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from aiodelay import Scheduler
from aiodelay.core.ids import new_id
from aiodelay.core.values import State
from aiodelay.operations.json_shapes import dead_letter_shape, message_shape, time_shape

from .errors import CommandError
from .output import json_line
from .place import Place

__all__ = ["FORMAT", "export"]

FORMAT = 1
"""The version of the line format. A reader skips keys that it does not know."""
END = b'{"kind":"end"'
"""The first bytes of the last line of an export."""


async def export(
    *,
    output: Path | None = None,
    place: Place = Place(),
) -> int:
    """Write pauses, messages and dead letters as JSON lines, which `aiodelay import` reads into any store.

    Stop all processes that schedule or dispatch before the export. Otherwise the file may miss messages that change
    during the export, or hold messages that this store also delivers. The export leaves out the positions of intakes,
    and the store's memory of ended messages.

    Args:
        output: The file to write. Default: stdout. Until the file is complete, its name ends in `.part`.
    """
    counts = {"hold": 0, "message": 0, "dead_letter": 0}
    in_flight = 0
    async with place.opened() as scheduler:
        with _opened(output) as file:
            async for line in _lines(scheduler, place):
                file.write(json_line(line) + "\n")
                in_flight += line.get("state") == State.IN_FLIGHT
                if line["kind"] in counts:
                    counts[line["kind"]] += 1
            file.write(json_line({"kind": "end"} | counts) + "\n")
    summary = (
        json_line(counts) if place.json else ", ".join(f"{n} {kind.replace('_', ' ')}s" for kind, n in counts.items())
    )
    print(summary, file=sys.stderr)
    if in_flight:
        print(f"{in_flight} messages were in flight: this store may deliver them as well", file=sys.stderr)
    return 0


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # `aiodelay import` reads UTF-8 in every locale
        yield sys.stdout
        sys.stdout.flush()  # if the write fails, it must fail before the line that reports success
        return
    is_device = output.exists() and not output.is_file()
    part = output if is_device else output.with_name(f"{output.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
        if not is_device:
            part.replace(output)
    except OSError as error:
        raise CommandError(f"--output {output}: {error.strerror}") from None
    finally:
        if not is_device:
            with suppress(OSError):
                part.unlink()


async def _lines(scheduler: Scheduler, place: Place) -> AsyncIterator[dict[str, Any]]:
    store = scheduler.store
    yield {
        "kind": "export",
        "format": FORMAT,
        "export": new_id(),
        "store": store.name,
        "namespace": place.namespace,
        "at": time_shape(store.now_ms()),
    }
    for lane, address in await store.paused():
        yield {"kind": "hold", "lane": lane, "address": address}
    async for snapshot in scheduler.pending():
        if not snapshot.record.no_retry:  # leave out messages cancelled in flight: their last attempt runs here
            yield {"kind": "message"} | message_shape(snapshot)
    async for letter in scheduler.dead_letters():
        yield {"kind": "dead_letter"} | dead_letter_shape(letter)
