"""`aiodelay export`: what a store holds, as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
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
"""Version of the lines; readers skip keys that they do not know."""
END = b'{"kind":"end"'
"""How the last line begins."""


async def export(
    *,
    output: Path | None = None,
    place: Place = Place(),
) -> int:
    """Write holds, messages and dead letters as JSON lines, which `aiodelay import` reads into any store.

    What is scheduled, moved or delivered meanwhile may be missed, or be in the file and delivered here as well: stop
    what writes and dispatches before. Positions of intakes, and what the store remembers of ended messages, stay here.

    Args:
        output: A file to write; without it, stdout. The file gets its name once it is whole; until then `.part` stands
            at the end of the name.
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
    told = (
        json_line(counts) if place.json else ", ".join(f"{n} {kind.replace('_', ' ')}s" for kind, n in counts.items())
    )
    print(told, file=sys.stderr)
    if in_flight:
        print(f"{in_flight} messages were in flight: what delivers them here goes on", file=sys.stderr)
    return 0


@contextmanager
def _opened(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        sys.stdout.flush()  # before anybody is told that all is written
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
    for lane, address in await store.holds():
        yield {"kind": "hold", "lane": lane, "address": address}
    async for snapshot in scheduler.pending():
        if not snapshot.record.no_retry:  # cancelled: what is in flight here is its last attempt
            yield {"kind": "message"} | message_shape(snapshot)
    async for letter in scheduler.dead_letters():
        yield {"kind": "dead_letter"} | dead_letter_shape(letter)
