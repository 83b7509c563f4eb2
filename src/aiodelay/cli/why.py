"""`aiodelay why`: explains the state of a message, with its journal."""

from __future__ import annotations

from aiodelay.core.values import JournalEntry
from aiodelay.errors import cut
from aiodelay.operations.diagnosis import Story, story_of
from aiodelay.operations.json_shapes import story_shape

from .errors import NOT_FOUND
from .output import moment, print_json, print_table
from .place import Place

__all__ = ["why"]

MOST_TEXT = 1_000


async def why(id_: str, /, *, place: Place = Place()) -> int:
    """Explain the state of a message: why it was not delivered yet, or how it ended.

    For messages that have ended, the store needs a journal. Add ?journal=100000 (for Kafka, ?history=TOPIC) to the
    store's URL, here and in the processes that write to the store.

    Args:
        id_: The id of the message.
    """
    async with place.opened() as scheduler:
        story = await story_of(scheduler, id_)
    if place.json:
        print_json(story_shape(story))
    else:
        _print_story(story)
    return NOT_FOUND if story.cause == "unknown" else 0


def _print_story(story: Story) -> None:
    print(f"{story.cause.replace('_', ' ')}: {cut(story.text, MOST_TEXT)}")
    if story.advice:
        print(f"advice: {cut(story.advice, MOST_TEXT)}")
    if story.journal:
        print()
        print_table(("at", "what", "attempt", "due", "detail"), map(_row, story.journal))


def _row(entry: JournalEntry) -> tuple[object, ...]:
    due = moment(entry.due_ms) if entry.due_ms else ""
    return moment(entry.at_ms), entry.event.replace("_", " "), entry.attempt, due, entry.detail
