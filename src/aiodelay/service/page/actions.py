"""What is changed from the page: first shown, with what it is done to; then, once confirmed, done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from aiodelay.inputs import due_of
from aiodelay.model import DeadKey
from aiodelay.service.api import bulk
from aiodelay.service.api.dead import revision_of
from aiodelay.service.api.models import BulkIn
from aiodelay.service.api.problems import ApiError, wrong
from aiodelay.service.api.security import audited, caller_of, check_allowed
from aiodelay.service.api.served import Opened, Plan, served_of
from aiodelay.service.config import Scope
from aiodelay.shapes import read_time

from .dead import DEAD_FIELDS, dead_filter_in
from .messages import FIELDS, filter_in, in_utc
from .rendering import shown
from .requests import Form, form_of, screen, store_of
from .session import local
from .state import state_of

__all__ = ["TYPED_FROM", "confirm", "plan"]

TYPED_FROM = 101
"""From so many on the number has to be typed."""
SHOWN = 5
WHOLE = {"more": False}
"""What was chosen one by one is all there is."""
OF_MESSAGES, OF_LETTERS, OF_PLACES = ("cancel", "fire", "reschedule"), ("redrive", "purge"), ("pause", "resume")
TELLS: dict[str, tuple[str, str]] = {
    "cancel": ("Cancel", "What is being delivered just now goes on; no retry and no recurrence follows."),
    "fire": ("Fire now", "Due at once, instead of at its time. What is in flight already stays as it is."),
    "reschedule": ("Reschedule", "Moved to another time; all else stays."),
    "redrive": ("Redrive", "Given a new life, due now, with attempts from 1 and a new delivery id."),
    "purge": ("Purge", "Deleted for good: a dead letter that is purged cannot be redriven."),
    "pause": ("Pause", "For all instances, until it is resumed. What is in flight goes on."),
    "resume": ("Resume", "What is due then is delivered at once."),
}


@screen("read")
async def plan(request: Request) -> Response:
    """Show what would be done; nothing is done yet."""
    form = await form_of(request)
    store, action = store_of(request, form.one("store")), form.one("action")
    if action not in TELLS:
        raise wrong(422, "ActionError", "action", repr(action[:64]), ", ".join(TELLS))
    check_allowed(request, _scope_of(action, form))
    found, seen = await _planned(request, store, action, form)
    if not found.names:
        raise ApiError(422, "NothingChosenError", "nothing is chosen, or nothing matches any more: go back and choose")
    token = served_of(request).plans.add(found)
    return await _asked(request, store, found, seen=seen, back=form.one("back"), token=token)


def _scope_of(action: str, form: Form) -> Scope:
    """Return what a token has to be for: one's own single message needs less than many."""
    is_single = action in OF_MESSAGES and form.one("scope") != "all" and len(form.all("id")) == 1
    return "schedule" if is_single else "operate"


async def _planned(request: Request, store: Opened, action: str, form: Form) -> tuple[Plan, dict[str, Any]]:
    by, most = caller_of(request).name, served_of(request).limits.max_examined
    at, delay = _when(form) if action == "reschedule" else (None, None)
    if form.one("scope") == "all" and action not in OF_PLACES:
        of_letters = action in OF_LETTERS
        fields = {name: form.one(name) or None for name in (DEAD_FIELDS if of_letters else FIELDS)}
        messages, dead = (None, dead_filter_in(fields)) if of_letters else (filter_in(fields), None)
        return await bulk.planned(BulkIn(action, messages, dead, at, delay), store, by=by, most=most)  # type: ignore[arg-type]
    if action in OF_LETTERS:
        return Plan(action, by, store.name, letters=[_key(each) for each in form.all("letter")]), WHOLE
    if action == "reschedule":
        due_of(read_time(at, "at"), delay, store.scheduler._open_store().now_ms())
    options = {"at": at, "delay": delay} if action == "reschedule" else {}
    ids = [each for each in form.all("what" if action in OF_PLACES else "id") if each]
    return Plan(action, by, store.name, ids=ids, options=options), WHOLE


def _when(form: Form) -> tuple[str | None, str | None]:
    return in_utc(form.one("at") or None), form.one("delay") or None


def _key(text: str) -> DeadKey:
    revision, _, message_id = text.partition(" ")
    return DeadKey(message_id, revision_of(revision))


async def _asked(
    request: Request, store: Opened, found: Plan, *, seen: dict[str, Any], back: str, token: str, mistake: str = ""
) -> Response:
    title, tells = TELLS[found.action]
    count = len(found.names)
    return shown(
        request,
        "confirm.html",
        store,
        status=422 if mistake else 200,
        facts=await state_of(request).shared.facts(store),
        title=title,
        tells=tells,
        what=_what(found.action, count),
        count=count,
        first=found.names[:SHOWN],
        options={name: value for name, value in found.options.items() if value},
        seen=seen,
        is_typed=count >= TYPED_FROM,
        mistake=mistake,
        confirm=token,
        back_to=local(request, back),
        is_grave=found.action in ("cancel", "purge"),
    )


def _what(action: str, count: int) -> str:
    if action in OF_PLACES:
        return "destination" if count == 1 else "destinations"
    name = "dead letter" if action in OF_LETTERS else "message"
    return name if count == 1 else f"{name}s"


@screen("read")
async def confirm(request: Request) -> Response:
    """Do what was shown, once; to exactly what was found, as far as it is still there."""
    form = await form_of(request)
    store, served, by = store_of(request, form.one("store")), served_of(request), caller_of(request).name
    token, back = form.one("confirm"), form.one("back")
    found = served.plans.find(token, by=by, store=store.name)
    is_single = found.action in OF_MESSAGES and len(found.ids) == 1
    check_allowed(request, "schedule" if is_single else "operate")
    count = len(found.names)
    if count >= TYPED_FROM and form.one("typed") != str(count):
        mistake = f"Type {count}, the number of what this is done to."
        return await _asked(request, store, found, seen=WHOLE, back=back, token=token, mistake=mistake)
    served.plans.take(token, by=by, store=store.name)
    with audited(request, f"page {found.action}", store=store.name, ids=found.names) as facts:
        facts["outcomes"] = outcomes = dict(Counter(await _done(store, found)))
    title, _ = TELLS[found.action]
    return shown(
        request,
        "done.html",
        store,
        facts=await state_of(request).shared.facts(store),
        title=title,
        what=_what(found.action, count),
        count=count,
        outcomes=sorted(outcomes.items()),
        first=found.names[:SHOWN],
        back_to=local(request, back),
    )


async def _done(store: Opened, found: Plan) -> Sequence[str]:
    scheduler = store.scheduler
    if found.action == "pause":
        return ["paused" if await scheduler.pause(each) else "was_paused" for each in found.ids]
    if found.action == "resume":
        return ["resumed" if await scheduler.resume(each) else "was_not_paused" for each in found.ids]
    return await bulk.done(store, found)
