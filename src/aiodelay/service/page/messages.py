"""The screens of messages: a list with filters from the URL, the recurring series, and one message."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from aiodelay.core.recurrence import Rule, decode_rule, describe, upcoming
from aiodelay.core.values import DeadLetter, JournalEntry, Record, State
from aiodelay.errors import InputError, RecordFormatError, UnsupportedByStoreError
from aiodelay.operations.diagnosis import Around, cause_of, limited_key
from aiodelay.operations.queries import Page, page, page_of_id, series_page
from aiodelay.scheduler import Scheduler
from aiodelay.service.api.cursors import filter_of, read_cursor, write_cursor
from aiodelay.service.api.messages import not_found
from aiodelay.service.api.models import FilterIn
from aiodelay.service.api.served import Opened, served_of

from .payload import viewed
from .rendering import shown, url_of
from .requests import screen, store_of, wanted
from .state import state_of

__all__ = ["FIELDS", "Attempt", "filter_in", "in_utc", "message", "messages", "recurring", "rule_words"]

FIELDS = ("state", "lane", "address", "type", "text", "due_from", "due_to")
PER_PAGE = 50
ENTRIES_READ, ENTRIES_SHOWN = 5_000, 200
EVENTS_OF_ATTEMPTS = {"again": "failed", "dead": "given up", "lapsed": "lapsed", "delivered": "delivered"}


def filter_in(fields: dict[str, str | None]) -> FilterIn:
    """Return the filter of messages from the fields of a URL or a form."""
    return FilterIn(
        [lane] if (lane := fields.get("lane")) else [],
        fields.get("state"),
        in_utc(fields.get("due_from")),
        in_utc(fields.get("due_to")),
        fields.get("address"),
        fields.get("type"),
        fields.get("text"),
    )


def in_utc(text: str | None) -> str | None:
    """Return a time with an offset. Times from forms are in UTC, but lack the offset."""
    if text is None or "T" not in text or text.endswith("Z") or "+" in text or "-" in text.partition("T")[2]:
        return text
    return f"{text}Z"


@screen("read")
async def messages(request: Request) -> Response:
    """List pending messages."""
    store = store_of(request)
    given = {name: wanted(request, name) for name in FIELDS}
    exact = wanted(request, "id")
    facts = await state_of(request).shared.facts(store)
    found, mistake = Page([], None, 0, None), ""
    try:
        found = await _page_of(request, store, given, exact)
    except InputError as error:
        mistake = str(error)
    after = write_cursor(found.after)
    return shown(
        request,
        "messages.html",
        store,
        status=422 if mistake else 200,
        search_mistake=mistake,
        facts=facts,
        found=found.messages,
        examined=found.examined,
        of=found.of,
        given=given,
        exact=exact or "",
        is_filtered=exact is not None or any(given.values()),
        is_first=wanted(request, "after") is None,
        next_url=url_of(request, store, "messages", after=after, **given) if after else "",
        states=[each.value for each in State],
    )


async def _page_of(request: Request, store: Opened, given: dict[str, str | None], exact: str | None) -> Page:
    """Return the page of messages that a URL asks for.

    Raises:
        InputError: A filter in the URL is wrong.
    """
    matching = filter_of(filter_in(given))
    if exact is not None:
        return await page_of_id(store.scheduler, matching, exact)
    limits = served_of(request).limits
    where = read_cursor(wanted(request, "after"), tuple[int, str])
    size = min(PER_PAGE, limits.max_page)
    return await page(store.scheduler, matching, after=where, limit=size, most=limits.max_examined)


@screen("read")
async def recurring(request: Request) -> Response:
    """List the recurring series."""
    store = store_of(request)
    facts = await state_of(request).shared.facts(store)
    where = read_cursor(wanted(request, "after"), tuple[int, str])
    size = min(PER_PAGE, served_of(request).limits.max_page)
    answer = await series_page(store.scheduler, after=where, limit=size)
    rows = [(each, *_rule_of(each.record, facts.now_ms)) for each in answer.messages]
    after = write_cursor(answer.after)
    return shown(
        request,
        "recurring.html",
        store,
        facts=facts,
        rows=rows,
        examined=answer.examined,
        of=answer.of,
        next_url=url_of(request, store, "recurring", after=after) if after else "",
    )


def _rule_of(record: Record, now_ms: int) -> tuple[str, Sequence[int]]:
    """Return the rule of a series in words, and the times of its next occurrences."""
    try:
        rule: Rule = decode_rule(record.envelope.rule)
    except RecordFormatError as error:
        return str(error), []
    return describe(rule), upcoming(rule, max(now_ms, record.due_ms), 3)


def rule_words(record: Record, now_ms: int) -> str:
    """Return the rule of a series in words; "" for a message that is not a series."""
    return _rule_of(record, now_ms)[0] if record.envelope.rule is not None else ""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt, its outcome, and the time of its end."""

    number: int
    outcome: str
    at_ms: int
    detail: str


@screen("read")
async def message(request: Request) -> Response:
    """Show a message and its journal. A message that has ended is shown if the journal still knows it."""
    store, message_id = store_of(request), request.path_params["id"]
    scheduler = store.scheduler
    facts = await state_of(request).shared.facts(store)
    snapshot = await scheduler.get(message_id)
    entries = await _entries(scheduler, message_id)
    letters = [] if snapshot else await _letters(scheduler, message_id)
    if snapshot is None and not letters and not entries:
        raise not_found(message_id)
    paused = await scheduler.opened_store().paused()
    around = Around(
        facts.now_ms,
        paused,
        await scheduler.blocked(),
        facts.lanes,
        entries[0].at_ms if entries else None,
        await limited_key(scheduler, snapshot) if snapshot else None,
    )
    cause, text, advice = cause_of(message_id, snapshot, letters, entries, around)
    record = snapshot.record if snapshot else letters[-1].record if letters else None
    return shown(
        request,
        "message.html",
        store,
        facts=facts,
        id=message_id,
        snapshot=snapshot,
        letter=letters[-1] if letters else None,
        record=record,
        rule=rule_words(record, facts.now_ms) if record else "",
        payload=viewed(record.envelope.payload, wanted(request, "view")) if record else None,
        cause=cause,
        text=text,
        advice=advice,
        entries=None if entries is None else entries[-ENTRIES_SHOWN:],
        is_more=entries is not None and len(entries) > ENTRIES_SHOWN,
        attempts=_attempts(entries or (), letters),
    )


async def _entries(scheduler: Scheduler, message_id: str) -> list[JournalEntry] | None:
    """Return the journal entries of a message, at most `ENTRIES_READ`; None if the store keeps no journal."""
    entries: list[JournalEntry] = []
    try:
        while len(entries) < ENTRIES_READ:
            after = entries[-1].number if entries else 0
            found = await scheduler.journal(message_id, after=after, limit=500)
            entries += found
            if len(found) < 500:
                break
    except UnsupportedByStoreError:
        return None
    return entries


async def _letters(scheduler: Scheduler, message_id: str) -> list[DeadLetter]:
    """Return the latest dead letters of a message, oldest first."""
    latest = deque[DeadLetter](maxlen=ENTRIES_SHOWN)
    async for each in scheduler.dead_letters(message_id=message_id):
        latest.append(each)
    return list(latest)


def _attempts(entries: Sequence[JournalEntry], letters: Sequence[DeadLetter]) -> Sequence[Attempt]:
    """Return the attempts of a message, latest first. The error of the last attempt comes from the dead letter."""
    errors = {each.record.revision: each.record.last_error for each in letters}
    found: list[Attempt] = []
    for each in reversed(entries):
        if each.event in EVENTS_OF_ATTEMPTS:
            error = errors.get(each.revision) if each.event == "dead" else None
            outcome = "put off" if each.is_put_off else EVENTS_OF_ATTEMPTS[each.event]
            found.append(Attempt(max(each.attempt, 1), outcome, each.at_ms, error or each.detail))
    return found[:ENTRIES_SHOWN]
