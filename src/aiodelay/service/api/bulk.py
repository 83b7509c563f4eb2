"""The routes of bulk actions: plan an action, confirm the plan, follow and stop the operation that carries it out."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Query, Request, Response

from aiodelay.core.transitions import occurrence_of
from aiodelay.core.validation import due_of
from aiodelay.core.values import DeadKey, Limit, Stored
from aiodelay.errors import AiodelayError, StoreError
from aiodelay.operations.json_shapes import read_time, time_shape
from aiodelay.operations.limit_change import change_limit
from aiodelay.operations.queries import DeadFilter, Filter, dead_page, page
from aiodelay.scheduler import Scheduler

from .bodies import Json, read_json
from .cursors import dead_filter_of, filter_of
from .models import BulkIn, BulkListOut, BulkOut, BulkPlanOut, DeadFilterIn, FilterIn, SeriesOut
from .plans import PLAN_MS, Operation, Plan, Rest, Target
from .problems import INTERNAL, problem_of, wrong
from .schemas import documents
from .security import Caller, audit, audited_by, caller_of, needs
from .served import Opened, Store, served_of

__all__ = [
    "MOST",
    "begin",
    "changing",
    "confirm",
    "end",
    "get_operation",
    "list_operations",
    "plan",
    "planned",
    "reading",
    "stop",
]

log: logging.Logger = logging.getLogger("aiodelay.service")
reading: APIRouter = APIRouter(prefix="/v1/bulk", tags=["bulk"], route_class=needs("read"))
changing: APIRouter = APIRouter(prefix="/v1/bulk", tags=["bulk"], route_class=needs("operate"))

MOST = 1_000
"""The most targets that a plan finds. The operation finds the remaining targets."""
STEP = 500
"""The number of targets in one step. A step changes its targets together. An operation can stop between two steps."""
SHOWN = 5
WAIT_S, MOST_WAIT_S = 10.0, 60.0
OF_LETTERS = ("redrive", "purge")


# --- plan -------------------------------------------------------------------------------------------------


@changing.post("", summary="Plan a bulk action: find its targets", **documents(BulkPlanOut, BulkIn))
async def plan(request: Request, store: Store) -> Response:
    """Changes nothing. The service keeps the plan for five minutes. `POST /v1/bulk/{confirm}` carries it out."""
    served = served_of(request)
    given = await read_json(request, served.limits, BulkIn)
    found = await planned(given, store, by=caller_of(request).name, most=served.limits.max_examined)
    ids, series = found.names, SeriesOut(len(found.series), list(found.series[:SHOWN]), included=found.with_series)
    more, token = found.rest is not None, served.plans.add(found)
    answer = (given.action, len(ids), ids[:SHOWN], series, more, found.examined, found.of, token, PLAN_MS // 1000)
    return Json(BulkPlanOut(*answer))


async def planned(given: BulkIn, store: Opened, *, by: str, most: int) -> Plan:
    """Find the targets of an action, and return the plan with the targets.

    Args:
        given: The action and the filter.
        store: The store to search.
        by: The caller that may confirm the plan.
        most: The most messages to compare with the filter.
    """
    _check(given, store)
    options = {"at": given.at, "delay": given.delay} if given.action == "reschedule" else {}
    if given.action in OF_LETTERS:
        wanted: Filter | DeadFilter = dead_filter_of(given.dead or DeadFilterIn())
    else:
        wanted = filter_of(given.messages or FilterIn())
    found = await _find(store, given.action, Rest(wanted, None), limit=MOST, most=most)
    return Plan(
        given.action,
        by,
        store.name,
        found.targets,
        found.series,
        given.series,
        found.rest,
        found.examined,
        found.of,
        options,
    )


def _check(given: BulkIn, store: Opened) -> None:
    """Refuse arguments that would fail only after the plan is confirmed."""
    other = "messages" if given.action in OF_LETTERS else "dead"
    if getattr(given, other) is not None:
        raise wrong(422, "BulkError", other, f"given with {given.action}", "the filter that belongs to the action")
    if given.action == "reschedule":
        due_of(read_time(given.at, "at"), given.delay, store.scheduler.opened_store().now_ms())
    elif given.at is not None or given.delay is not None:
        raise wrong(422, "BulkError", "at, delay", f"given with {given.action}", "only with reschedule")
    if given.series and given.action != "cancel":
        raise wrong(422, "BulkError", "series", f"given with {given.action}", "only with cancel")


class _Found(NamedTuple):
    """The targets that one step of a search found, and where the search goes on."""

    targets: list[Target]
    series: list[str]
    rest: Rest | None
    examined: int
    of: int | None


async def _find(store: Opened, action: str, search: Rest, *, limit: int, most: int) -> _Found:
    if isinstance(search.wanted, DeadFilter):
        letters = await dead_page(store.scheduler, search.wanted, after=search.after, limit=limit, most=most)  # type: ignore[arg-type]
        rest = None if letters.after is None else Rest(search.wanted, letters.after)
        return _Found([each.key for each in letters.letters], [], rest, letters.examined, letters.of)
    messages = await page(store.scheduler, search.wanted, after=search.after, limit=limit, most=most)  # type: ignore[arg-type]
    # A retry of an occurrence of a series has no id that a command may name.
    records = [each.record for each in messages.messages if occurrence_of(each.record.id) is None]
    series = [each.id for each in records if action == "cancel" and each.envelope.rule is not None]
    targets: list[Target] = [each.id for each in records if action != "cancel" or each.envelope.rule is None]
    rest = None if messages.after is None else Rest(search.wanted, messages.after)
    return _Found(targets, series, rest, messages.examined, messages.of)


# --- operations -------------------------------------------------------------------------------------------


@changing.post("/{operation}", summary="Carry out a plan", **documents(BulkOut, unfinished=202))
async def confirm(
    operation: str,
    request: Request,
    store: Store,
    wait: Annotated[
        float, Query(ge=0, le=MOST_WAIT_S, description="The most seconds to wait for the operation's end.")
    ] = WAIT_S,
) -> Response:
    """Starts an operation in the background, and waits up to `wait` seconds for its end.

    `operation` is the value of `confirm` in the plan. Only the caller that made the plan may confirm it. It is safe to
    repeat the request.
    """
    operations = served_of(request).operations
    is_known = operation in operations
    begun = operations.find(operation, store=store.name) if is_known else begin(request, store, operation)
    await begun.wait(wait)
    return _answer(begun)


def begin(request: Request, store: Opened, token: str, *, with_series: bool = False, via: str = "bulk") -> Operation:
    """Start the operation that carries out a plan.

    Args:
        request: The request that confirms the plan.
        store: The store of the plan.
        token: The token of the plan.
        with_series: Cancel recurring series too, even if the plan leaves them out.
        via: The first word of the actions in the audit log.

    Raises:
        ApiError: This caller has no plan with this token, or too many operations are running.
    """
    served, caller = served_of(request), caller_of(request)
    found = served.plans.find(token, by=caller.name, store=store.name)
    if with_series:
        found = replace(found, with_series=True)
    most = served.limits.max_examined
    begun = served.operations.start(token, found, lambda each: _carry_out(each, store, caller, most=most, via=via))
    served.plans.drop(token)
    return begun


def _answer(found: Operation) -> Response:
    return Json(_shape(found), status_code=202 if found.ended_ms is None else 200)


def _shape(found: Operation) -> BulkOut:
    return BulkOut(
        found.token,
        found.plan.action,
        found.state,
        found.is_stopping and found.ended_ms is None,
        found.found,
        found.changed,
        dict(found.outcomes),
        SeriesOut(len(found.series), found.series[:SHOWN], included=found.plan.with_series),
        found.error or None,
        found.plan.by,
        time_shape(found.began_ms),
        None if found.ended_ms is None else time_shape(found.ended_ms),
    )


@reading.get("", summary="List bulk operations, latest first", **documents(BulkListOut))
async def list_operations(request: Request, store: Store) -> Response:
    """Lists the running operations, and the operations that ended most recently."""
    return Json(BulkListOut([_shape(each) for each in served_of(request).operations.all(store=store.name)]))


@reading.get("/{operation}", summary="Get the progress or the result of a bulk operation", **documents(BulkOut))
async def get_operation(operation: str, request: Request, store: Store) -> Response:
    """`operation` is the value of `confirm` in the plan."""
    return Json(_shape(served_of(request).operations.find(operation, store=store.name)))


@changing.post("/{operation}/stop", summary="Stop a bulk operation", **documents(BulkOut, unfinished=202))
async def stop(operation: str, request: Request, store: Store) -> Response:
    """The operation ends after its current step. Changes that the operation has made so far remain."""
    found = served_of(request).operations.find(operation, store=store.name)
    end(request, found)
    await found.wait(WAIT_S)
    return _answer(found)


def end(request: Request, found: Operation) -> None:
    """Stop an operation after its current step, and write the caller to the audit log."""
    found.is_stopping = True
    audit(request, "stop bulk", operation=found.token, store=found.plan.store)


async def _carry_out(operation: Operation, store: Opened, caller: Caller, *, most: int, via: str) -> None:
    """Find all targets, then change them in steps.

    The operation fails if the search fails, a whole step fails, or all changes of a step end in store errors.
    """
    try:
        targets = await _all_targets(operation, store, most)
        operation.state = "changing"
        for first in range(0, len(targets), STEP):
            if operation.is_stopping:
                return
            await _change(operation, store, caller, targets[first : first + STEP], via)
    except AiodelayError as error:
        operation.error = problem_of(error).detail
    except Exception:
        log.exception("the operation %s failed", operation.token)
        operation.error = INTERNAL.detail


async def _all_targets(operation: Operation, store: Opened, most: int) -> list[Target]:
    plan, targets = operation.plan, list(operation.plan.targets)
    rest = plan.rest
    while rest is not None and not operation.is_stopping:
        found = await _find(store, plan.action, rest, limit=STEP, most=most)
        targets += found.targets
        operation.series += found.series
        operation.found, rest = len(targets), found.rest
    if plan.with_series:
        targets += operation.series
        operation.found = len(targets)
    return targets


async def _change(operation: Operation, store: Opened, caller: Caller, targets: Sequence[Target], via: str) -> None:
    plan = operation.plan
    ids = [each.id if isinstance(each, DeadKey) else each for each in targets]
    with audited_by(caller, f"{via} {plan.action}", operation=operation.token, store=store.name, ids=ids) as facts:
        answers = await _answers(store.scheduler, plan, targets)
        outcomes = Counter(map(_word, answers))
        facts["outcomes"] = dict(outcomes)
    operation.outcomes += outcomes
    operation.changed += len(targets)
    errors = [each for each in answers if isinstance(each, StoreError)]
    if len(errors) == len(targets):  # the store does not answer: each further step would only wait for its timeout
        raise errors[0]


async def _answers(scheduler: Scheduler, plan: Plan, targets: Sequence[Target]) -> Sequence[object]:
    """Change targets; return an outcome for each target: a word, an outcome value, or an exception.

    For a purge, only the number of each outcome is known: the outcomes do not have the order of the targets.
    """
    keys = [each for each in targets if isinstance(each, DeadKey)]
    if plan.action == "purge":
        purged = await scheduler.purge(*keys)
        return ["purged"] * purged + ["not_found"] * (len(keys) - purged)
    if plan.action == "redrive":
        outcomes = await scheduler.redrive(*keys)
        return [each.answer if isinstance(each, Stored) else getattr(each, "reason", "unknown") for each in outcomes]
    change = _change_of(scheduler, plan)
    return await asyncio.gather(*(change(str(each)) for each in targets), return_exceptions=True)


def _change_of(scheduler: Scheduler, plan: Plan) -> Callable[[str], Awaitable[object]]:
    match plan.action:
        case "cancel":
            return scheduler.cancel
        case "fire":
            return scheduler.fire
        case "pause":
            return lambda each: _word_of(scheduler.pause(each), "paused", "was_paused")
        case "resume":
            return lambda each: _word_of(scheduler.resume(each), "resumed", "was_not_paused")
        case "limit" | "end_limit":
            new = Limit(**plan.options) if plan.action == "limit" else None
            words = ("ended", "not_found") if new is None else ("replaced", "set")
            return lambda each: _word_of(change_limit(scheduler, each, plan.options["key"], new), *words)
        case _:
            at, delay = read_time(plan.options["at"], "at"), plan.options["delay"]
            return lambda each: scheduler.reschedule(each, at=at, delay=delay)


async def _word_of(change: Awaitable[bool], yes: str, no: str) -> str:
    return yes if await change else no


def _word(answer: object) -> str:
    if isinstance(answer, BaseException):
        if not isinstance(answer, AiodelayError):
            raise answer
        return type(answer).__name__
    return str(answer)
