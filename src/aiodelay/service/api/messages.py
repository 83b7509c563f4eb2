"""The routes of messages: list, get, schedule, replace, cancel, reschedule, fire."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from hashlib import sha256
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from msgspec import structs

from aiodelay.core.validation import check_id
from aiodelay.core.values import (
    CancelOutcome,
    Conflict,
    FireOutcome,
    Message,
    RescheduleOutcome,
    Scheduled,
    ScheduleOutcome,
)
from aiodelay.errors import OutcomeUnknownError, cut, shortened
from aiodelay.operations.json_shapes import message_shape, read_message, read_time
from aiodelay.operations.queries import page, page_of_id

from .bodies import NDJSON, PLAIN, Json, body_of, check_type, read_json
from .cursors import filter_of, read_cursor, write_cursor
from .models import FilterIn, LineOut, ListOut, MessageIn, MessageOut, OutcomeOut, ScheduledOut, WhenIn
from .problems import ApiError, wrong
from .schemas import documents
from .security import audited, caller_of, needs
from .served import After, Limit, Opened, Store, served_of, store_of
from .streams import answer_of, schedule_lines

__all__ = [
    "cancel",
    "changing",
    "fire",
    "get_message",
    "in_list",
    "list_messages",
    "not_found",
    "put_message",
    "reading",
    "reschedule",
    "schedule",
    "with_key",
]

reading: APIRouter = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=needs("read"))
changing: APIRouter = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=needs("schedule"))
scheduling: APIRouter = APIRouter(prefix="/v1/messages", tags=["messages"], route_class=needs("schedule", store_of))

MAX_KEY = 255
_REVISION_TAG = re.compile(r'"([0-9]{1,14})"')
IDEMPOTENCY_KEY = {
    "Idempotency-Key": "Names the request. A repeat with the same key stores a message without an `id` only once."
}
IF_MATCH = {
    "If-Match": 'Change the message only if it still has this revision, such as "1795279631915"; otherwise 412.'
}


def not_found(message_id: str) -> ApiError:
    """Return the error for an id under which no message is pending."""
    return ApiError(404, "MessageNotFoundError", f"no message {shortened(message_id)} is pending or in flight")


def _refuse_preconditions(request: Request, *known: str) -> None:
    """Refuse a precondition that the route would ignore: the client relies on it.

    Args:
        request: The request.
        known: The preconditions that the route reads.
    """
    for name in ("if-match", "if-none-match"):
        if name not in known and name in request.headers:
            allowed = "If-Match with PUT and DELETE; for a new message, the conflict rule error"
            raise wrong(422, "PreconditionError", name, repr(cut(request.headers[name])), allowed)


_NOT_IN_LISTS = frozenset({"payload", "payload_base64", "appended", "appended_base64", "traceback"})

# --- read -------------------------------------------------------------------------------------------------


def in_list(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON form of a message for lists, without payload, appended items and traceback."""
    return {name: value for name, value in shape.items() if name not in _NOT_IN_LISTS}


@reading.get("", summary="List messages by next attempt", **documents(ListOut))
async def list_messages(
    *,
    request: Request,
    store: Store,
    limit: Limit,
    after: After = None,
    id: Annotated[str | None, Query(description="Only this message.")] = None,  # noqa: A002 - its name in the URL
    lane: Annotated[list[str], Query(description="Only these lanes.", max_length=100)] = [],  # noqa: B006
    state: Annotated[str | None, Query(description="scheduled, overdue, in_flight or held.")] = None,
    due_from: Annotated[str | None, Query(description="Next attempt at this time or later; ISO 8601.")] = None,
    due_to: Annotated[str | None, Query(description="Next attempt before this time; ISO 8601.")] = None,
    address: Annotated[str | None, Query(description="Only messages to this address of a sink.")] = None,
    type: Annotated[str | None, Query(description="Only this event type.")] = None,  # noqa: A002 - its name in the URL
    text: Annotated[str | None, Query(description="Only ids that contain this text.")] = None,
) -> Response:
    """An index answers the filters `lane`, `due_from`, `due_to` and `id`.

    For `state`, `address`, `type` and `text` the service compares messages one by one, and one request compares a
    limited number. The answer gives this number as `examined`, and the number of messages to compare in all as `of`. To
    go on, send the `after` of the answer as `after`.
    """
    wanted = filter_of(FilterIn(lane, state, due_from, due_to, address, type, text))
    most, place = served_of(request).limits.max_examined, read_cursor(after, tuple[int, str])
    if id is not None:
        found_page = await page_of_id(store.scheduler, wanted, id)
    else:
        found_page = await page(store.scheduler, wanted, after=place, limit=limit, most=most)
    return Json(
        {
            "messages": [in_list(message_shape(each)) for each in found_page.messages],
            "after": write_cursor(found_page.after),
            "examined": found_page.examined,
            "of": found_page.of,
        }
    )


@reading.get("/{id:path}", summary="Get a pending message, with its payload", **documents(MessageOut, etag=True))
async def get_message(id: str, store: Store) -> Response:  # noqa: A002 - its name in the URL
    """A retry of an occurrence of a series has the id `<id of the series>~<due time in ms>`."""
    found = await store.scheduler.get(id)
    if found is None:
        raise not_found(id)
    return Json(message_shape(found), headers=_etag(found.record.revision))


# --- schedule ---------------------------------------------------------------------------------------------


@scheduling.post(
    "",
    summary="Schedule one message, or a stream of them",
    **documents(ScheduledOut, MessageIn, lines=LineOut, status=201, headers=IDEMPOTENCY_KEY, etag=True),
)
async def schedule(request: Request, store: Store) -> Response:
    """Send one JSON object, or any number of lines as `application/x-ndjson`. Each line gets its own answer.

    With `Idempotency-Key`, a repeat of the request with the same key stores a message without an `id` only once. This
    holds until 24 hours after the message has ended. The answer to a repeat describes the stored message. The service
    makes the id of the message from the key, the name of the token and, in a stream, the number of the line.
    """
    _refuse_preconditions(request)
    key = _idempotency_key(request)
    if check_type(request, PLAIN, NDJSON) == NDJSON:
        return await schedule_lines(request, store, lambda message, line: with_key(request, store, message, key, line))
    given = read_message(await body_of(request, served_of(request).limits))
    return await _schedule(
        request, store, with_key(request, store, given, key), is_keyed=given.id is None and bool(key)
    )


@changing.put(
    "/{id:path}",
    summary="Store a message under an id",
    **documents(ScheduledOut, MessageIn, headers=IF_MATCH, etag=True),
)
async def put_message(id: str, request: Request, store: Store) -> Response:  # noqa: A002 - its name in the URL
    """Replaces a pending message with this id, unless `conflict` or `If-Match` forbids it."""
    revision = _meant_revision(request)
    message = read_message(await body_of(request, served_of(request).limits))
    if message.id not in (None, id):
        raise wrong(
            422, "MessageIdError", "id", shortened(message.id), f"the id of the URL ({shortened(id)}), or no id"
        )
    message = structs.replace(message, id=id)
    if revision is not None:
        if message.conflict != Conflict.replace():
            raise wrong(
                422, "IfMatchError", "conflict", shortened(message.conflict.mode), "no conflict together with If-Match"
            )
        message = structs.replace(message, conflict=Conflict.if_revision(revision))
    return await _schedule(request, store, message, is_keyed=False, must_match=revision is not None)


async def _schedule(
    request: Request, store: Opened, message: Message, *, is_keyed: bool, must_match: bool = False
) -> Response:
    with audited(request, "schedule", store=store.name, id=message.id or "", to=message.to or "") as facts:
        scheduled = await _scheduled(store, message)
        shape = answer_of(scheduled, is_keyed=is_keyed)
        facts |= {"id": scheduled.id, "outcome": shape["outcome"]}
    if must_match and scheduled.outcome is ScheduleOutcome.OUTDATED:
        raise _not_matched(scheduled.id)
    is_new = shape["outcome"] in ("stored", "replaced") and request.method == "POST"
    return Json(shape, 201 if is_new else 200, headers=_etag(shape["revision"]))


async def _scheduled(store: Opened, message: Message) -> Scheduled:
    store.check(message)
    fields = {name: getattr(message, name) for name in message.__struct_fields__ if name != "event"}
    try:
        return await store.scheduler.schedule(message.event, **fields)
    except OutcomeUnknownError as error:
        found = await error.retry()
        assert isinstance(found, Scheduled)
        return found


def _etag(revision: int) -> dict[str, str]:
    return {"etag": f'"{revision}"'} if revision else {}


def _meant_revision(request: Request) -> int | None:
    """Return the revision that `If-Match` demands; None if the request has no such header."""
    _refuse_preconditions(request, "if-match")
    given = request.headers.get("if-match")
    if given is None:
        return None
    found = _REVISION_TAG.fullmatch(given)
    if found is None:
        raise wrong(422, "IfMatchError", "if-match", repr(cut(given)), 'a revision in quotes: "1795279631915"')
    return int(found[1])


def _not_matched(message_id: str) -> ApiError:
    detail = f"message {shortened(message_id)} does not have the revision that If-Match names"
    return ApiError(412, "RevisionError", detail)


def _idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= MAX_KEY and key.isprintable()):
        raise wrong(
            422, "IdempotencyKeyError", "idempotency-key", repr(cut(key)), f"1 to {MAX_KEY} printable characters"
        )
    return key


def with_key(request: Request, store: Opened, message: Message, key: str | None, line: int | None = None) -> Message:
    """Return a message with an id: its own id, or else an id made from the idempotency key.

    With such an id, a repeat of the request stores nothing again. Without a key, the message is returned unchanged.

    Raises:
        ApiError: The id would be made from the key, and the message has a conflict rule of its own. With such a rule, a
            repeat could store the message again.
    """
    if key is None or message.id is not None:
        return message
    if message.conflict != Conflict.replace():
        allowed = "no conflict together with Idempotency-Key, unless the message has an id"
        raise wrong(422, "IdempotencyKeyError", "conflict", shortened(message.conflict.mode), allowed)
    digest = sha256(f"{caller_of(request).name}\n{key}".encode()).hexdigest()[:40]
    message_id = f"key-{digest}" if line is None else f"key-{digest}-{line}"
    known = store.scheduler.opened_store().traits.conflicts
    # `newer` also refuses a repeat after the message has ended, because the store remembers versions.
    # `keep` compares with pending messages only.
    once = Conflict.newer(0) if "newer" in known else Conflict.keep() if "keep" in known else message.conflict
    return structs.replace(message, id=message_id, conflict=once)


# --- change -----------------------------------------------------------------------------------------------


@changing.delete("/{id:path}", summary="Cancel a message, or a series", **documents(OutcomeOut, headers=IF_MATCH))
async def cancel(id: str, request: Request, store: Store) -> Response:  # noqa: A002 - its name in the URL
    """The outcome `in_flight` means that the present attempt goes on. No retry and no further occurrence follows.

    The outcome `recorded` means that the cancel is stored. Only the owner of the Kafka partition knows whether an
    attempt is in flight.
    """
    revision = _meant_revision(request)
    return await _outcome_answer(request, store, "cancel", id, store.scheduler.cancel(id, if_revision=revision))


@changing.post("/{id:path}/reschedule", summary="Move a message to another time", **documents(OutcomeOut, WhenIn))
async def reschedule(id: str, request: Request, store: Store) -> Response:  # noqa: A002 - its name in the URL
    """Changes only the due time. The answer is 409 if the message is already being delivered at its old due time."""
    _refuse_preconditions(request)
    when = await read_json(request, served_of(request).limits, WhenIn)
    moving = store.scheduler.reschedule(id, at=read_time(when.at, "at"), delay=when.delay)
    return await _outcome_answer(request, store, "reschedule", id, moving)


@changing.post("/{id:path}/fire", summary="Make a message due now", **documents(OutcomeOut))
async def fire(id: str, request: Request, store: Store) -> Response:  # noqa: A002 - its name in the URL
    """The outcome `in_flight` means that the message is being delivered already."""
    _refuse_preconditions(request)
    return await _outcome_answer(request, store, "fire", id, store.scheduler.fire(id))


async def _outcome_answer(
    request: Request,
    store: Opened,
    action: str,
    message_id: str,
    command: Awaitable[CancelOutcome | RescheduleOutcome | FireOutcome],
) -> Response:
    with audited(request, action, store=store.name, id=message_id) as facts:
        outcome = await command
        facts["outcome"] = outcome.value
    if outcome.value == "not_found":
        raise not_found(message_id)
    if outcome.value == "outdated":
        raise _not_matched(message_id)
    if outcome.value == "too_late":
        detail = f"message {shortened(message_id)} is already being delivered at its old due time"
        raise ApiError(409, "TooLateError", detail)
    return Json({"id": check_id(message_id), "outcome": outcome.value})
