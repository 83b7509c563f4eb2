"""What goes in and out as JSON. The OpenAPI document is made of these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from aiodelay.core.values import DeadReason, State

__all__ = [
    "Base64",
    "BlockedOut",
    "BulkIn",
    "BulkListOut",
    "BulkOut",
    "BulkPlanOut",
    "ConflictByNumberIn",
    "ConsumerOut",
    "ConsumersOut",
    "CountsOut",
    "DeadFilterIn",
    "DeadKeyIn",
    "DeadKeysIn",
    "DeadListOut",
    "DeadOut",
    "Etf1Info",
    "Etf1Kafka",
    "Etf1Schedule",
    "FilterIn",
    "HoldsOut",
    "JournalEntryOut",
    "JournalOut",
    "LaneOut",
    "LateIn",
    "LatenessBucketOut",
    "LatenessOut",
    "LineOut",
    "ListOut",
    "LoadBucketOut",
    "LoadOut",
    "MessageIn",
    "MessageOut",
    "MovedOut",
    "OutcomeOut",
    "Problem",
    "PurgedOut",
    "RecordOut",
    "RedrivenOut",
    "RuleIn",
    "ScheduledOut",
    "SeriesOut",
    "StoreOut",
    "StoresOut",
    "WhatIn",
    "WhenIn",
]


class Problem(Struct, frozen=True):
    """An error, after RFC 9457; `error` is its stable name, `value` what was given, shortened, never a payload."""

    type: str
    title: str
    status: int
    error: str
    detail: str
    field: str | UnsetType = UNSET
    value: str | UnsetType = UNSET
    allowed: str | UnsetType = UNSET


# --- in ---------------------------------------------------------------------------------------------------


class RuleIn(Struct, frozen=True):
    """A recurrence: of `interval` ("10m") and `cron` ("0 9 * * mon") exactly one."""

    interval: str | None = None
    cron: str | None = None
    tz: str | None = None
    start: str | None = None
    missed: str | None = None
    overlap: str | None = None


class ConflictByNumberIn(Struct, frozen=True):
    """`newer`: the higher version wins. `if_revision`: what still has this revision is replaced. One of the two."""

    newer: int | UnsetType = UNSET
    if_revision: int | UnsetType = UNSET


class LateIn(Struct, frozen=True):
    """What is done with what would be delivered later than this after its due time; one of the two."""

    drop: str | None = None
    dead_letter: str | None = None


class Base64(Struct, frozen=True):
    """Bytes that are no UTF-8 text."""

    base64: str


class MessageIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A message to schedule; `shapes.read_message` reads it.

    `to`: `<sink>:<address>`, or `handler:<type name>`. `payload`: a text, delivered as UTF-8; an object or array,
    delivered as it is written; null with a key: a record without value; or `payload_base64`. Exactly one of `at` (ISO
    8601 with an offset), `delay` ("1h30m") and `every` ("10m", "0 9 * * mon", or an object). `id`: yours, to replace or
    cancel it by.
    """

    to: str
    payload: str | dict[str, Any] | list[Any] | None = None
    payload_base64: str | None = None
    at: str | None = None
    delay: str | None = None
    every: str | RuleIn | None = None
    id: str | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str | Base64] | None = None
    conflict: Literal["replace", "keep", "error"] | ConflictByNumberIn | None = None
    late: Literal["deliver"] | LateIn | None = None


class WhenIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A new due time: exactly one of the two."""

    at: str | None = None
    delay: str | None = None


class WhatIn(Struct, frozen=True, forbid_unknown_fields=True):
    """What is paused or resumed: a handler's name, a sink, or one destination: "kafka", "kafka:orders"."""

    what: str


class DeadKeyIn(Struct, frozen=True, forbid_unknown_fields=True):
    """Names a dead letter."""

    id: str
    revision: int


class DeadKeysIn(Struct, frozen=True, forbid_unknown_fields=True):
    """Dead letters, at most 1,000."""

    letters: list[DeadKeyIn]


class FilterIn(Struct, frozen=True, forbid_unknown_fields=True):
    """Which messages; as the query of `GET /v1/messages`."""

    lane: list[str] = []
    state: str | None = None
    due_from: str | None = None
    due_to: str | None = None
    address: str | None = None
    type: str | None = None
    text: str | None = None


class DeadFilterIn(Struct, frozen=True, forbid_unknown_fields=True):
    """Which dead letters; as the query of `GET /v1/dead`."""

    lane: list[str] = []
    reason: str | None = None
    dead_from: str | None = None
    dead_to: str | None = None
    text: str | None = None
    error: str | None = None


class BulkIn(Struct, frozen=True, forbid_unknown_fields=True):
    """What to do with all that match.

    Attributes:
        messages: Which messages, for cancel, fire and reschedule.
        dead: Which dead letters, for redrive and purge.
        at: For reschedule: the new due time.
        delay: Or how long from then on.
        series: For cancel: end recurring series too; otherwise they are left out.
    """

    action: Literal["cancel", "fire", "reschedule", "redrive", "purge"]
    messages: FilterIn | None = None
    dead: DeadFilterIn | None = None
    at: str | None = None
    delay: str | None = None
    series: bool = False


# --- out --------------------------------------------------------------------------------------------------


class ScheduledOut(Struct, frozen=True):
    """What became of a message; `repeated`: its idempotency key was known, and nothing was stored again.

    `older_in_flight`: it replaced a version that is still being delivered.
    """

    id: str
    outcome: Literal["stored", "replaced", "kept", "in_flight", "outdated", "repeated"]
    due: str | None
    revision: int
    older_in_flight: bool | UnsetType = UNSET


class LineOut(Struct, frozen=True):
    """What became of one line of a stream, from 1: `scheduled`, or `problem`. The last line has the totals instead."""

    line: int | UnsetType = UNSET
    scheduled: ScheduledOut | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET
    stored: int | UnsetType = UNSET
    refused: int | UnsetType = UNSET


class OutcomeOut(Struct, frozen=True):
    """What a command came to."""

    id: str
    outcome: Literal[
        "cancelled",
        "recorded",
        "in_flight",
        "rescheduled",
        "fired",
        "paused",
        "was_paused",
        "resumed",
        "was_not_paused",
    ]


class RecordOut(Struct, frozen=True):
    """What is stored of a message.

    Of `key` and `key_base64`, and of `payload` and `payload_base64`, one is there; lists have no payload.
    `is_cancelled`: the message was cancelled while it was in flight, and no attempt follows the present one.
    """

    id: str
    to: str
    type: str | None
    encoding: str
    due: str
    revision: int
    delivery_id: str
    attempt: int
    lapses: int
    kills: int
    is_cancelled: bool
    is_last_attempt: Annotated[
        bool, Meta(description="The former name of `is_cancelled`.", extra_json_schema={"deprecated": True})
    ]
    version: int | None
    every: dict[str, Any] | None
    retrying: list[str]
    late: str | dict[str, str]
    headers: dict[str, str | Base64]
    trace: dict[str, str]
    bytes: int
    first_error: str | None
    earlier_errors: list[str]
    last_error: str | None
    key: str | UnsetType | None = UNSET
    key_base64: str | UnsetType = UNSET
    payload: str | UnsetType | None = UNSET
    payload_base64: str | UnsetType = UNSET


class MessageOut(RecordOut, frozen=True, kw_only=True):
    """A message as it stands; `next_attempt`: when it may be delivered next, `due` stays what it was."""

    state: State
    next_attempt: str


class ListOut(Struct, frozen=True):
    """One page.

    Attributes:
        after: Give it as `after` to read on; null at the end.
        examined: How many messages were looked at.
        of: Of how many, where filters have to look at each; null where an index answers.
    """

    messages: list[MessageOut]
    after: str | None
    examined: int
    of: int | None


class DeadOut(RecordOut, frozen=True, kw_only=True):
    """A message given up, with the reason and the time; `traceback`, of its last attempt, is not in lists."""

    reason: DeadReason
    given_up: str
    traceback: str | UnsetType | None = UNSET


class DeadListOut(Struct, frozen=True):
    """One page, oldest first; fields as of a page of messages."""

    letters: list[DeadOut]
    after: str | None
    examined: int
    of: int


class MovedOut(Struct, frozen=True):
    """What became of one dead letter."""

    id: str
    revision: int
    outcome: Literal["stored", "not_found", "exists", "undecodable", "unavailable", "full", "unknown"]


class RedrivenOut(Struct, frozen=True):
    """What became of each dead letter.

    `stored`; `not_found`; `exists`, where its id is scheduled again; `undecodable`, where its record cannot be read, so
    that nothing tells where it goes.
    """

    letters: list[MovedOut]


class PurgedOut(Struct, frozen=True):
    """How many dead letters were deleted."""

    purged: int


class LaneOut(Struct, frozen=True):
    """One handler's or sink's messages; `read_by_nobody`: no live instance serves it."""

    lane: str
    scheduled: int
    overdue: int
    in_flight: int
    held: int
    dead: int
    read_by_nobody: bool


class CountsOut(Struct, frozen=True):
    """Messages by lane and state, and since when the longest waiting one could have been delivered."""

    lanes: list[LaneOut]
    oldest_overdue: str | None
    now: str


class LoadBucketOut(Struct, frozen=True):
    """How many messages of a lane come due from a time on, within one bucket."""

    from_: str = field(name="from")
    lane: str = ""
    messages: int = 0


class LoadOut(Struct, frozen=True):
    """What comes due; empty buckets are left out."""

    bucket: str
    buckets: list[LoadBucketOut]


class LatenessBucketOut(Struct, frozen=True):
    """How many were at most that late, and later than the bucket before says; null = any longer."""

    up_to_ms: int | None
    messages: int


class LatenessOut(Struct, frozen=True):
    """How late first attempts of the last 5 minutes began; `is_complete`: each of their journal entries was read."""

    samples: int
    p50_ms: int | None
    p99_ms: int | None
    max_ms: int | None
    buckets: list[LatenessBucketOut]
    is_complete: bool


class BlockedOut(Struct, frozen=True):
    """A destination that takes nothing now."""

    to: str
    reason: str
    messages: int


class HoldsOut(Struct, frozen=True):
    """What is paused, and what is blocked."""

    paused: list[str]
    blocked: list[BlockedOut]


class ConsumerOut(Struct, frozen=True):
    """A consumer of a topic.

    `waiting` is its lag. `away`: nothing is in flight to it, and it has asked for nothing for a minute; `seen` says
    when it last did. `cursor`: of a log, the last index up to which it is done.
    """

    topic: str
    kind: Literal["fan-out", "log"]
    consumer: str
    ordered: bool
    since: str
    seen: str | None
    away: bool
    waiting: int
    in_flight: int
    retrying: int
    missed: int
    cursor: int | None


class ConsumersOut(Struct, frozen=True):
    """Consumers, by topic, kind and name; `after` as of a page."""

    consumers: list[ConsumerOut]
    after: str | None


class JournalEntryOut(Struct, frozen=True):
    """One thing that happened."""

    number: int
    at: str
    event: Literal[
        "stored",
        "replaced",
        "cancelled",
        "rescheduled",
        "fired",
        "claimed",
        "delivered",
        "again",
        "dead",
        "dropped",
        "skipped",
        "lapsed",
        "redriven",
    ]
    id: str
    revision: int
    lane: str
    due: str | None
    attempt: int
    detail: str


class JournalOut(Struct, frozen=True):
    """What happened, in order; `after`: the number to read on from."""

    entries: list[JournalEntryOut]
    after: int


class StoreOut(Struct, frozen=True):
    """A store, and what it can do."""

    name: str
    url: str
    namespace: str
    abilities: list[str]
    conflicts: list[str]
    allowed_targets: list[str]


class StoresOut(Struct, frozen=True):
    """The stores of this service."""

    stores: list[StoreOut]
    read_only: bool


class Etf1Schedule(Struct, frozen=True, rename={"target_topic": "target-topic", "target_key": "target-key"}):
    """A schedule, as etf1/kafka-message-scheduler shows it; times in seconds, the value in base64."""

    id: str
    epoch: int
    timestamp: int
    topic: str
    target_topic: str
    target_key: str
    value: str | None


class Etf1Kafka(Struct, frozen=True):
    """Where its topics are; nothing where the store is another one."""

    bootstrap_servers: str
    topics: list[str]
    history_topic: str


class Etf1Info(Struct, frozen=True):
    """What etf1/kafka-message-scheduler tells of itself."""

    hostname: str
    address: list[str]
    server_address: str
    kafka: Etf1Kafka


class SeriesOut(Struct, frozen=True):
    """The recurring series that match a cancel.

    Attributes:
        count: How many are known so far.
        first: The ids of the first of them.
        included: They are ended too; otherwise they are left out.
    """

    count: int
    first: list[str]
    included: bool


class BulkPlanOut(Struct, frozen=True):
    """What would be done, to be confirmed by `POST /v1/bulk/{confirm}`.

    Attributes:
        count: How many it would be done to, as far as found; without recurring series.
        first: The ids of the first of them.
        series: The recurring series that match, of a cancel.
        more: More may match: the operation finds them before it changes anything.
        examined: How many were looked at.
        of: Of how many; null where an index answers.
        confirm: Names this plan, and the operation that carries it out.
        expires_s: Seconds until it is forgotten.
    """

    action: str
    count: int
    first: list[str]
    series: SeriesOut
    more: bool
    examined: int
    of: int | None
    confirm: str
    expires_s: int


class BulkOut(Struct, frozen=True):
    """A bulk operation.

    Attributes:
        operation: Its name: the token that confirmed the plan.
        state: It finds what matches, then changes it; then it has ended in one of three ways.
        stopping: It ends after the step that it is at.
        found: How many targets are known.
        changed: Of how many the outcome is known.
        outcomes: How many came to which outcome.
        series: The recurring series that match, of a cancel.
        error: Why it failed.
        by: Who confirmed it.
    """

    operation: str
    action: str
    state: Literal["finding", "changing", "done", "stopped", "failed"]
    stopping: bool
    found: int
    changed: int
    outcomes: dict[str, int]
    series: SeriesOut
    error: str | None
    by: str
    began: str
    ended: str | None


class BulkListOut(Struct, frozen=True):
    """Bulk operations, latest first."""

    operations: list[BulkOut]
