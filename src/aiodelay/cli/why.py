"""`aiodelay why`: the story of a message."""

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
    """Tell the whole story of a message, and why it did not arrive.

    What ended is known from the journal, where the processes that write keep one: ?journal=100000 in the store's URL,
    here as there.

    Args:
        id_: The message.
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
