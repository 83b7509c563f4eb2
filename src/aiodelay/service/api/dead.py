"""The routes of dead letters: list, get, redrive, purge."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from aiodelay.core.validation import check_count
from aiodelay.core.values import DeadKey, Stored
from aiodelay.errors import cut
from aiodelay.operations.json_shapes import dead_letter_shape
from aiodelay.operations.queries import dead_letter, dead_page

from .bodies import Json, read_json
from .cursors import dead_filter_of, read_cursor, write_cursor
from .messages import in_list
from .models import DeadFilterIn, DeadKeysIn, DeadListOut, DeadOut, PurgedOut, RedrivenOut
from .problems import ApiError, unknown_if_unavailable, wrong
from .schemas import documents
from .security import audited, needs
from .served import After, Limit, Store, served_of

__all__ = [
    "MOST_LETTERS",
    "changing",
    "get_letter",
    "letter_not_found",
    "list_letters",
    "purge",
    "reading",
    "redrive",
    "revision_of",
]

reading: APIRouter = APIRouter(prefix="/v1/dead", tags=["dead letters"], route_class=needs("read"))
changing: APIRouter = APIRouter(prefix="/v1/dead", tags=["dead letters"], route_class=needs("operate"))

MOST_LETTERS = 1_000
MOST_REVISION = (1 << 48) - 1
Revision = Annotated[int, Path(ge=0, le=MOST_REVISION)]


def revision_of(text: str) -> int:
    """Return the revision that a text names.

    Raises:
        ApiError: The text is not a revision.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 15 and int(text) <= MOST_REVISION):
        raise wrong(422, "LettersError", "revision", repr(cut(text)), f"0 to {MOST_REVISION}")
    return int(text)


@reading.get("", summary="List dead letters, oldest first", **documents(DeadListOut))
async def list_letters(
    *,
    request: Request,
    store: Store,
    limit: Limit,
    after: After = None,
    lane: Annotated[list[str], Query(description="Only these lanes.", max_length=100)] = [],  # noqa: B006
    reason: Annotated[str | None, Query(description="Only messages given up for this reason.")] = None,
    dead_from: Annotated[str | None, Query(description="Given up at this time or later; ISO 8601.")] = None,
    dead_to: Annotated[str | None, Query(description="Given up before this time; ISO 8601.")] = None,
    text: Annotated[str | None, Query(description="Only ids that contain this text.")] = None,
    error: Annotated[
        str | None, Query(description="The class of the last error; none = only letters whose error names no class.")
    ] = None,
) -> Response:
    """Leaves out payloads and tracebacks.

    One request compares a limited number of letters with the filters. The answer gives this number as `examined`, and
    the number of all letters as `of`. To go on, send the `after` of the answer as `after`.
    """
    wanted = dead_filter_of(DeadFilterIn(lane, reason, dead_from, dead_to, text, error))
    most = served_of(request).limits.max_examined
    found = await dead_page(
        store.scheduler, wanted, after=read_cursor(after, tuple[int, str, int]), limit=limit, most=most
    )
    return Json(
        {
            "letters": [in_list(dead_letter_shape(each)) for each in found.letters],
            "after": write_cursor(found.after),
            "examined": found.examined,
            "of": found.of,
        }
    )


@reading.get("/{revision}/{id:path}", summary="Get a dead letter, with payload and traceback", **documents(DeadOut))
async def get_letter(revision: Revision, id: str, store: Store) -> Response:  # noqa: A002 - its name in the URL
    """`id` and `revision` together are the key of the dead letter."""
    letter = await dead_letter(store.scheduler, DeadKey(id, revision))
    if letter is None:
        raise letter_not_found(revision, id)
    return Json(dead_letter_shape(letter))


def letter_not_found(revision: int, message_id: str) -> ApiError:
    """Return the error for a dead letter that does not exist."""
    return ApiError(404, "DeadLetterNotFoundError", f"no dead letter {cut(message_id)} of revision {revision}")


async def _keys(request: Request) -> list[DeadKey]:
    given = await read_json(request, served_of(request).limits, DeadKeysIn)
    if not 1 <= len(given.letters) <= MOST_LETTERS:
        raise wrong(422, "LettersError", "letters", f"a list of {len(given.letters)} letters", f"1 to {MOST_LETTERS}")
    return [DeadKey(each.id, check_count(each.revision, "revision", 0, MOST_REVISION)) for each in given.letters]


@changing.post("/redrive", summary="Schedule dead letters again, due now", **documents(RedrivenOut, DeadKeysIn))
async def redrive(request: Request, store: Store) -> Response:
    """Each letter has its own outcome: `stored`, `not_found`, `exists` (its id is pending), or `undecodable`."""
    keys = await _keys(request)
    with unknown_if_unavailable(), audited(request, "redrive", store=store.name, ids=[key.id for key in keys]) as facts:
        outcomes = [
            each.answer if isinstance(each, Stored) else getattr(each, "reason", "unknown")
            for each in await store.scheduler.redrive(*keys)
        ]
        facts["outcomes"] = dict(Counter(outcomes))
    letters = [
        {"id": key.id, "revision": key.revision, "outcome": each} for key, each in zip(keys, outcomes, strict=True)
    ]
    return Json({"letters": letters})


@changing.post("/purge", summary="Delete dead letters for good", **documents(PurgedOut, DeadKeysIn))
async def purge(request: Request, store: Store) -> Response:
    """The count `purged` leaves out letters that do not exist any more."""
    keys = await _keys(request)
    with unknown_if_unavailable(), audited(request, "purge", store=store.name, ids=[key.id for key in keys]) as facts:
        facts["purged"] = purged = await store.scheduler.purge(*keys)
    return Json({"purged": purged})
