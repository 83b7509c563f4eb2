"""The errors for a schedules topic that has changed in a way that the store cannot accept."""

from __future__ import annotations

from aiodelay.errors import StoreMismatchError

from .settings import Place

__all__ = ["cut_off", "moved_keys"]


def moved_keys(topic: str, before: int, now: int) -> StoreMismatchError:
    """Return the error for a topic whose number of partitions has changed."""
    what = (
        f"divided into {now} partitions, instead of {before}: a change or cancel of an older message may not reach it"
    )
    new = f"a new topic with {now} partitions, and this topic as the second topic in the URL until it is empty"
    return StoreMismatchError(f"topic {topic}", what, f"{new}; or, to go on all the same, accept_partitions={now}")


def cut_off(place: Place, end: int, read_to: int) -> StoreMismatchError:
    """Return the error for a partition that ends before an offset up to which it was read."""
    what = f"deleted, or cut off: partition {place.number} ends at {end}, and has been read to {read_to}"
    return StoreMismatchError(
        f"topic {place.topic}", what, "the topic as it was; to go on with this topic, restart this process"
    )
