"""What is done to all messages or dead letters that match: first counted, then, once confirmed, done."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from fastapi import APIRouter, Request, Response

from aiodelay.errors import AiodelayError
from aiodelay.inputs import due_of
from aiodelay.model import Stored
from aiodelay.queries import dead_page, page
from aiodelay.shapes import read_time

from .bodies import Json, read_json
from .cursors import dead_filter_of, filter_of
from .models import BulkDoneOut, BulkIn, BulkPlanOut, DeadFilterIn, FilterIn
from .problems import wrong
from .schemas import documents
from .security import audited, caller_of, needs
from .served import PLAN_MS, Opened, Plan, Store, served_of

__all__ = ["changing", "confirm", "done", "plan", "planned"]

changing: APIRouter = APIRouter(prefix="/v1/bulk", tags=["bulk"], route_class=needs("operate"))

MOST = 1_000
"""How many one plan is about."""
SHOWN = 5
OF_LETTERS = ("redrive", "purge")


@changing.post("", summary="Find out what an action would be done to", **documents(BulkPlanOut, BulkIn))
async def plan(request: Request, store: Store) -> Response:
    """Nothing is done. What was found, at most 1,000, is kept for five minutes: `POST /v1/bulk/{confirm}` does it."""
    served = served_of(request)
    given = await read_json(request, served.limits, BulkIn)
    found, seen = await planned(given, store, by=caller_of(request).name, most=served.limits.max_examined)
    ids = found.names
    answer = {"action": given.action, "count": len(ids), "first": ids[:SHOWN], **seen}
    return Json(answer | {"confirm": served.plans.add(found), "expires_s": PLAN_MS // 1000})


async def planned(given: BulkIn, store: Opened, *, by: str, most: int) -> tuple[Plan, dict[str, Any]]:
    """Return what an action would be done to; and whether there is more, and how many were examined, of how many.

    Args:
        given: The action and the filter.
        store: Where.
        by: Who may confirm it.
        most: Most messages to look at.
    """
    _check(given, store)
    if given.action in OF_LETTERS:
        dead = await dead_page(
            store.scheduler, dead_filter_of(given.dead or DeadFilterIn()), after=None, limit=MOST, most=most
        )
        letters = [each.key for each in dead.letters]
        seen: dict[str, Any] = {"more": dead.after is not None, "examined": dead.examined, "of": dead.of}
        return Plan(given.action, by, store.name, letters=letters), seen
    messages = await page(store.scheduler, filter_of(given.messages or FilterIn()), after=None, limit=MOST, most=most)
    seen = {"more": messages.after is not None, "examined": messages.examined, "of": messages.of}
    options = {"at": given.at, "delay": given.delay} if given.action == "reschedule" else {}
    ids = [each.record.id for each in messages.messages]
    return Plan(given.action, by, store.name, ids=ids, options=options), seen


def _check(given: BulkIn, store: Opened) -> None:
    """Refuse what would only fail once it is confirmed."""
    other = "messages" if given.action in OF_LETTERS else "dead"
    if getattr(given, other) is not None:
        raise wrong(422, "BulkError", other, f"given with {given.action}", "the filter of what the action is done to")
    if given.action == "reschedule":
        due_of(read_time(given.at, "at"), given.delay, store.scheduler._open_store().now_ms())
    elif given.at is not None or given.delay is not None:
        raise wrong(422, "BulkError", "at, delay", f"given with {given.action}", "only with reschedule")


@changing.post("/{confirm}", summary="Do it", **documents(BulkDoneOut))
async def confirm(confirm: str, request: Request, store: Store) -> Response:
    """To exactly what was found, as far as it is still there; only by who asked, and once."""
    served = served_of(request)
    found = served.plans.take(confirm, by=caller_of(request).name, store=store.name)
    with audited(request, f"bulk {found.action}", store=store.name, ids=found.names) as facts:
        facts["outcomes"] = outcomes = dict(Counter(await done(store, found)))
    return Json({"action": found.action, "outcomes": outcomes})


async def done(store: Opened, plan: Plan) -> list[str]:
    """Carry out a plan; return what each message or letter came to."""
    scheduler = store.scheduler
    match plan.action:
        case "purge":
            purged = await scheduler.purge(*plan.letters)
            return ["purged"] * purged + ["not_found"] * (len(plan.letters) - purged)
        case "redrive":
            outcomes = await scheduler.redrive(*plan.letters)
            return [
                each.answer if isinstance(each, Stored) else getattr(each, "reason", "unknown") for each in outcomes
            ]
        case "cancel":
            calls: list[Any] = [scheduler.cancel(each) for each in plan.ids]
        case "fire":
            calls = [scheduler.fire(each) for each in plan.ids]
        case _:
            at, delay = read_time(plan.options["at"], "at"), plan.options["delay"]
            calls = [scheduler.reschedule(each, at=at, delay=delay) for each in plan.ids]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    return [_word(each) for each in answers]


def _word(answer: Any) -> str:  # noqa: ANN401 - an outcome or an exception
    if isinstance(answer, BaseException):
        if not isinstance(answer, AiodelayError):
            raise answer
        return type(answer).__name__
    return str(answer.value)
