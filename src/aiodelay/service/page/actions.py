"""Changes on the page: the page shows a plan with its targets. After the confirmation, an operation makes the changes.

The answer to each form is a redirect to a screen that can be reloaded: the plan, the operation, or the screen of the
form.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from difflib import get_close_matches

from fastapi import Request
from starlette.responses import Response

from aiodelay.core.validation import check_id, due_of
from aiodelay.core.values import DeadKey
from aiodelay.engine.control import lanes_and_address
from aiodelay.errors import AiodelayError, UnsupportedByStoreError
from aiodelay.operations.json_shapes import read_time
from aiodelay.scheduler import Scheduler
from aiodelay.service.api import bulk
from aiodelay.service.api.dead import revision_of
from aiodelay.service.api.models import BulkIn
from aiodelay.service.api.plans import Operation, Plan
from aiodelay.service.api.problems import ApiError, problem_of, wrong
from aiodelay.service.api.security import caller_of, check_allowed
from aiodelay.service.api.served import Opened, served_of
from aiodelay.service.config import Scope

from .dead import DEAD_FIELDS, dead_filter_in
from .forms import Form
from .limits import WRONG_FIELDS, limit_facts, limit_plan
from .messages import FIELDS, filter_in, in_utc
from .overview import instances_of
from .rendering import here_of, local, shown, url_of
from .requests import form_of, refused, screen, seen_at, store_of, wanted
from .state import state_of

__all__ = ["TYPED_FROM", "ask", "confirm", "operation", "plan", "stop"]

TYPED_FROM = 101
"""From this number of targets on, the user must type the number to confirm."""
SHOWN = 5
WAIT_S = 1.5
"""Seconds for which the answer to a confirmation waits for the end of the operation."""
MOST_NAMED = 12
OF_MESSAGES, OF_LETTERS, OF_PLACES = ("cancel", "fire", "reschedule"), ("redrive", "purge"), ("pause", "resume")
OF_LIMITS = ("limit", "end_limit")
ACTIONS: dict[str, tuple[str, str]] = {
    "cancel": ("Cancel", "An attempt in flight goes on. No retry and no further occurrence follows."),
    "fire": ("Fire now", "The due time becomes now. Messages in flight do not change."),
    "reschedule": ("Reschedule", "Only the due time changes."),
    "redrive": ("Redrive", "The messages are scheduled again, due now. Attempts count from 1; the delivery id is new."),
    "purge": ("Purge", "The dead letters are deleted for good. They cannot be redriven later."),
    "pause": ("Pause", "The pause applies to all instances, until a resume. Messages in flight go on."),
    "resume": ("Resume", "Messages that are already due are delivered at once."),
    "limit": ("Set", "The limit applies to all instances at once, also to messages that wait already."),
    "end_limit": ("End", "No message waits because of this limit any more."),
}


# --- plan -------------------------------------------------------------------------------------------------


@screen("read")
async def plan(request: Request) -> Response:
    """Store the plan of an action, and show it. Nothing is changed yet."""
    form = await form_of(request)
    store, action = store_of(request, form.one("store")), form.one("action")
    if action not in ACTIONS:
        raise wrong(422, "ActionError", "action", repr(action[:64]), ", ".join(ACTIONS))
    check_allowed(request, _scope_of(action, form))
    try:
        found = await _planned(request, store, action, form)
        if not (found.targets or found.series or found.rest):
            raise ApiError(422, "NothingChosenError", "nothing is ticked, or nothing matches the filter any more")
    except AiodelayError as error:
        problem = problem_of(error)
        if problem.status != 422:
            raise
        wrong_fields = WRONG_FIELDS.get(str(problem.field), ()) if action in OF_LIMITS else ()
        return refused(request, form, problem.detail, form.one("back"), wrong_fields)
    token = served_of(request).plans.add(found)
    return seen_at(url_of(request, store, f"plan/{token}", back=local(request, form.one("back"))))


def _scope_of(action: str, form: Form) -> Scope:
    """Return the scope that an action needs: `schedule` for one message, `operate` for more."""
    is_single = action in OF_MESSAGES and form.one("scope") != "all" and len(form.all("id")) == 1
    return "schedule" if is_single else "operate"


async def _planned(request: Request, store: Opened, action: str, form: Form) -> Plan:
    by, most = caller_of(request).name, served_of(request).limits.max_examined
    if action in OF_LIMITS:
        return await limit_plan(store, action, form, by=by)
    at, delay = _when(form) if action == "reschedule" else (None, None)
    if form.one("scope") == "all" and action not in OF_PLACES:
        of_letters = action in OF_LETTERS
        fields = {name: form.one(name) or None for name in (DEAD_FIELDS if of_letters else FIELDS)}
        messages, dead = (None, dead_filter_in(fields)) if of_letters else (filter_in(fields), None)
        return await bulk.planned(BulkIn(action, messages, dead, at, delay), store, by=by, most=most)  # type: ignore[arg-type]
    if action in OF_LETTERS:
        return Plan(action, by, store.name, [_key(each) for each in form.all("letter")])
    if action == "reschedule":
        due_of(read_time(at, "at"), delay, store.scheduler.opened_store().now_ms())
    options = {"at": at, "delay": delay} if action == "reschedule" else {}
    ids = [each for each in form.all("what" if action in OF_PLACES else "id") if each]
    if action in OF_PLACES:
        for each in ids:
            lanes_and_address(each)
    if action in OF_MESSAGES:
        for each in ids:
            check_id(each)
    series = await _series_among(store.scheduler, ids) if action == "cancel" else []
    if len(ids) == 1:  # the user chose this one message, so a series is ended without asking again
        return Plan(action, by, store.name, [] if series else ids, series, with_series=True, options=options)
    return Plan(action, by, store.name, [each for each in ids if each not in series], series, options=options)


async def _series_among(scheduler: Scheduler, ids: list[str]) -> list[str]:
    """Return only the ids of recurring series; no ids if the store cannot inspect messages."""
    try:
        found = await asyncio.gather(*map(scheduler.get, ids))
    except UnsupportedByStoreError:
        return []
    return [each.record.id for each in found if each is not None and each.record.envelope.rule is not None]


def _when(form: Form) -> tuple[str | None, str | None]:
    return in_utc(form.one("at") or None), form.one("delay") or None


def _key(text: str) -> DeadKey:
    revision, _, message_id = text.partition(" ")
    return DeadKey(message_id, revision_of(revision))


# --- confirm ----------------------------------------------------------------------------------------------


@screen("read")
async def ask(request: Request) -> Response:
    """Show a plan and ask for its confirmation. If the plan is confirmed already, show a link to the result."""
    store, served, token = store_of(request), served_of(request), request.path_params["token"]
    is_confirmed = token in served.operations
    if is_confirmed:
        found = served.operations.find(token, store=store.name).plan
    else:
        found = served.plans.find(token, by=caller_of(request).name, store=store.name)
    title, effect = ACTIONS[found.action]
    count = len(found.targets) or len(found.series)
    facts = await state_of(request).shared.facts(store)
    return shown(
        request,
        "confirm.html",
        store,
        facts=facts,
        title=title,
        effect=effect,
        what=_what(found.action, count),
        count=count,
        first=(found.names or found.series)[:SHOWN],
        changes=await _changes(store, found, is_confirmed=is_confirmed),
        plan=found,
        series=found.series[:SHOWN],
        unknown=await _unknown(store, found, list(facts.lanes)) if found.action in ("pause", "limit") else {},
        to_type=_to_type(found),
        token=token,
        is_confirmed=is_confirmed,
        back_to=local(request, wanted(request, "back") or ""),
        is_grave=found.action in ("cancel", "purge"),
    )


async def _changes(store: Opened, plan: Plan, *, is_confirmed: bool) -> Mapping[str, str]:
    """Return the values that a plan changes, by their names."""
    if plan.action in OF_LIMITS:
        return {} if is_confirmed else await limit_facts(store, plan)
    at, delay = plan.options.get("at"), plan.options.get("delay")
    return {"New time": at or f"in {delay}"} if at or delay else {}


def _what(action: str, count: int) -> str:
    names = {"dead letter": OF_LETTERS, "destination": OF_PLACES, "limit": OF_LIMITS}
    name = next((name for name, actions in names.items() if action in actions), "message")
    return name if count == 1 else f"{name}s"


def _to_type(plan: Plan) -> str:
    """Return the text that the user must type to confirm a plan; "" if a button is enough."""
    if plan.rest is not None:
        return "all"
    return str(len(plan.targets)) if len(plan.targets) >= TYPED_FROM else ""


async def _unknown(store: Opened, plan: Plan, lanes: list[str]) -> dict[str, list[str]]:
    """Return the destinations of a plan whose names the store does not know, each with known names to suggest.

    The suggestions are similar names; if no name is similar, at most `MOST_NAMED` of all known names.
    """
    scheduler = store.scheduler
    held = [lane for lane, _ in await scheduler.opened_store().paused()]
    served = [lane for each in await instances_of(store) for lane in each.lanes or ()]
    known = {*lanes, *served, *scheduler.demand(), *scheduler.sinks, *held}
    names = {each: lanes_and_address(each)[0] for each in plan.names}
    return {
        each: get_close_matches(each, known, 3) or sorted(known)[:MOST_NAMED]
        for each, lanes_of_it in names.items()
        if known.isdisjoint(lanes_of_it)
    }


@screen("read")
async def confirm(request: Request) -> Response:
    """Start the operation of a plan, once. A repeat of the form shows the same operation."""
    form = await form_of(request)
    store, served = store_of(request, form.one("store")), served_of(request)
    token, back = form.one("confirm"), local(request, form.one("back"))
    if token not in served.operations:
        found = served.plans.find(token, by=caller_of(request).name, store=store.name)
        is_single = found.action in OF_MESSAGES and found.rest is None and len(found.targets) + len(found.series) == 1
        check_allowed(request, "schedule" if is_single else "operate")
        with_series = found.with_series or form.one("series") == "yes"
        if mistake := _mistake(found, form, with_series=with_series):
            return refused(request, form, mistake, url_of(request, store, f"plan/{token}", back=back))
        try:
            begun = bulk.begin(request, store, token, with_series=with_series, via="page")
        except ApiError as error:  # too many operations are running
            return refused(request, form, error.problem.detail, url_of(request, store, f"plan/{token}", back=back))
        await begun.wait(WAIT_S)
    return seen_at(url_of(request, store, f"operations/{token}", back=back))


def _mistake(plan: Plan, form: Form, *, with_series: bool) -> str:
    """Return the reason to refuse a confirmation; "" if the confirmation is accepted."""
    to_type = _to_type(plan)
    if to_type and form.one("typed") != to_type:
        return f"Type {to_type} to confirm."
    if not plan.targets and plan.rest is None and not with_series:
        return "Only recurring series match. Tick the box that ends them."
    return ""


# --- operations -------------------------------------------------------------------------------------------


@screen("read")
async def operation(request: Request) -> Response:
    """Show the progress of an operation, or its result."""
    store = store_of(request)
    found = served_of(request).operations.find(request.path_params["token"], store=store.name)
    title, _ = ACTIONS[found.plan.action]
    return shown(
        request,
        "operation.html",
        store,
        title=title,
        operation=found,
        what=_what(found.plan.action, found.found),
        outcomes=sorted(found.outcomes.items()),
        first=_names(found)[:SHOWN],
        series=found.series[:SHOWN],
        is_over=found.ended_ms is not None,
        here_url=here_of(request),
        back_to=local(request, wanted(request, "back") or ""),
    )


def _names(operation: Operation) -> list[str]:
    return operation.plan.names + (operation.series if operation.plan.with_series else [])


@screen("operate")
async def stop(request: Request) -> Response:
    """Stop an operation after its current step."""
    form = await form_of(request)
    store = store_of(request, form.one("store"))
    found = served_of(request).operations.find(request.path_params["token"], store=store.name)
    bulk.end(request, found)
    await found.wait(WAIT_S)
    return seen_at(url_of(request, store, f"operations/{found.token}", back=local(request, form.one("back"))))
