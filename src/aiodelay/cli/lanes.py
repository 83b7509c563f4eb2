"""The commands `pause` and `resume`."""

from __future__ import annotations

from aiodelay.errors import cut

from .output import print_json
from .place import Place

__all__ = ["pause", "resume"]


async def pause(what: str | None = None, /, *, place: Place = Place()) -> None:
    """Pause an event type, a sink or a destination for all instances, or list the pauses.

    Messages of a paused destination can still be cancelled, replaced and listed. Attempts in flight go on.

    Args:
        what: An event type, a sink or a destination: payment.check, redis-list, redis-list:orders. Without WHAT, the
            command lists all pauses.
    """
    async with place.opened() as scheduler:
        if what is None:
            held = await scheduler.paused()
            print_json(*({"paused": each} for each in held)) if place.json else print(
                "\n".join(map(cut, held)) or "none"
            )
            return
        changed = await scheduler.pause(what)
    _print_outcome(what, place, is_paused=True, changed=changed)


async def resume(what: str, /, *, place: Place = Place()) -> None:
    """Resume a paused event type, sink or destination.

    Args:
        what: The name that was paused.
    """
    async with place.opened() as scheduler:
        changed = await scheduler.resume(what)
    _print_outcome(what, place, is_paused=False, changed=changed)


def _print_outcome(what: str, place: Place, *, is_paused: bool, changed: bool) -> None:
    if place.json:
        print_json({"what": what, "paused": is_paused, "changed": changed})
        return
    words = {
        (True, True): "paused",
        (True, False): "was paused already",
        (False, True): "resumed",
        (False, False): "was not paused",
    }
    print(f"{cut(what)} {words[is_paused, changed]}")
