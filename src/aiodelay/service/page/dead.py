"""The screens of dead letters: groups by error, a list, and one dead letter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from aiodelay.core.values import DeadKey
from aiodelay.errors import InputError
from aiodelay.operations.queries import DEAD_REASONS, NO_CLASS, DeadPage, dead_letter, dead_page, error_class
from aiodelay.scheduler import Scheduler
from aiodelay.service.api.cursors import dead_filter_of, read_cursor, write_cursor
from aiodelay.service.api.dead import letter_not_found, revision_of
from aiodelay.service.api.models import DeadFilterIn
from aiodelay.service.api.served import served_of

from .messages import rule_words
from .payload import viewed
from .rendering import shown, url_of
from .requests import screen, store_of, wanted
from .state import state_of

__all__ = ["DEAD_FIELDS", "Group", "dead", "dead_filter_in", "groups_of", "letter"]

DEAD_FIELDS = ("lane", "reason", "text", "error")
PER_PAGE = 50


def dead_filter_in(fields: dict[str, str | None]) -> DeadFilterIn:
    """Return the filter of dead letters from the fields of a URL or a form."""
    return DeadFilterIn(
        [lane] if (lane := fields.get("lane")) else [],
        fields.get("reason"),
        None,
        None,
        fields.get("text"),
        fields.get("error"),
    )


@dataclass(frozen=True, slots=True)
class Group:
    """The dead letters of one lane with the same reason and the same error class; "" = an error without a class."""

    lane: str
    reason: str
    error_class: str
    count: int
    first_ms: int
    last_ms: int
    error: str


async def groups_of(scheduler: Scheduler, most: int) -> tuple[Sequence[Group], int]:
    """Return the groups of the oldest letters, largest first, and the number of letters that were examined.

    Args:
        scheduler: The scheduler to inspect.
        most: The most letters to examine.
    """
    found: dict[tuple[str, str, str], Group] = {}
    examined = 0
    async for letter in scheduler.dead_letters(limit=most):
        examined += 1
        key = letter.record.envelope.lane, letter.reason, error_class(letter.record.last_error)
        before = found.get(key)
        first_ms, count = (letter.at_ms, 0) if before is None else (before.first_ms, before.count)
        found[key] = Group(*key, count + 1, first_ms, letter.at_ms, letter.record.last_error or "")
    return sorted(found.values(), key=lambda group: -group.count), examined


@screen("read")
async def dead(request: Request) -> Response:
    """List dead letters, oldest first."""
    store = store_of(request)
    given = {name: wanted(request, name) for name in DEAD_FIELDS}
    limits = served_of(request).limits
    most, size = limits.max_examined, min(PER_PAGE, limits.max_page)
    found, mistake = DeadPage([], None, 0, 0), ""
    try:
        wanted_letters = dead_filter_of(dead_filter_in(given))
        where = read_cursor(wanted(request, "after"), tuple[int, str, int])
        found = await dead_page(store.scheduler, wanted_letters, after=where, limit=size, most=most)
    except InputError as error:
        mistake = str(error)
    shared = state_of(request).shared
    groups, grouped = await shared.get(("groups", store.name), lambda: groups_of(store.scheduler, most))
    after = write_cursor(found.after)
    return shown(
        request,
        "dead.html",
        store,
        status=422 if mistake else 200,
        search_mistake=mistake,
        facts=await shared.facts(store),
        groups=groups,
        grouped_examined=grouped,
        letters=found.letters,
        examined=found.examined,
        of=found.of,
        given=given,
        is_filtered=any(given.values()),
        is_first=wanted(request, "after") is None,
        reasons=DEAD_REASONS,
        no_class=NO_CLASS,
        next_url=url_of(request, store, "dead", after=after, **given) if after else "",
    )


@screen("read")
async def letter(request: Request) -> Response:
    """Show a dead letter."""
    store = store_of(request)
    key = DeadKey(request.path_params["id"], revision_of(request.path_params["revision"]))
    found = await dead_letter(store.scheduler, key)
    if found is None:
        raise letter_not_found(key.revision, key.id)
    facts = await state_of(request).shared.facts(store)
    return shown(
        request,
        "letter.html",
        store,
        facts=facts,
        letter=found,
        record=found.record,
        rule=rule_words(found.record, facts.now_ms),
        payload=viewed(found.record.envelope.payload, wanted(request, "view")),
    )
