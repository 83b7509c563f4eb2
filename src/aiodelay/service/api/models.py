"""The JSON bodies of requests and answers. The routes use them, and the OpenAPI document is generated from them."""

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
    "ForecastOut",
    "JournalEntryOut",
    "JournalOut",
    "LaneForecastOut",
    "LaneOut",
    "LateIn",
    "LatenessBucketOut",
    "LatenessOut",
    "LimitIn",
    "LimitOut",
    "LimitedKeyOut",
    "LimitedKeysOut",
    "LimitsIn",
    "LimitsOut",
    "LineOut",
    "ListOut",
    "LoadBucketOut",
    "LoadOut",
    "MeasuredRateOut",
    "MessageIn",
    "MessageOut",
    "MovedOut",
    "OutcomeOut",
    "PausesOut",
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
    """An error, as RFC 9457 defines it.

    `error` is the stable name of the error. `value` is the wrong value, shortened. It never holds a payload.
    """

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
    """The rule of a recurring message: exactly one of `interval` ("10m") and `cron` ("0 9 * * mon")."""

    interval: str | None = None
    cron: str | None = None
    tz: str | None = None
    start: str | None = None
    missed: str | None = None
    overlap: str | None = None
    spread: str | None = None


class ConflictByNumberIn(Struct, frozen=True):
    """A conflict rule that compares numbers: exactly one of `newer` and `if_revision`.

    `newer`: the message with the higher version stays. `if_revision`: the message is replaced only if it still has
    this revision.
    """

    newer: int | UnsetType = UNSET
    if_revision: int | UnsetType = UNSET


class LateIn(Struct, frozen=True):
    """The rule for a message that is too late: exactly one of `drop` ("15m") and `dead_letter` ("15m").

    The value is the longest lateness at which the message is still delivered.
    """

    drop: str | None = None
    dead_letter: str | None = None


class Base64(Struct, frozen=True):
    """Bytes that are not UTF-8 text, in base64."""

    base64: str


class MessageIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A message to schedule.

    Attributes:
        to: `<sink>:<address>`, or `handler:<type name>`.
        payload: A text is delivered as UTF-8. An object or an array is delivered as JSON, as written here. Null with a
            key is delivered as a record without a value.
        payload_base64: The payload as bytes, in place of `payload`.
        at: The due time, ISO 8601 with an offset. Give exactly one of `at`, `delay` and `every`.
        delay: The duration until the due time, such as "1h30m".
        every: The rule of a recurring message: "10m", "0 9 * * mon", or an object.
        spread: A span after the due time, such as "5m": the id gives the message's place in the span.
        id: Your id, by which you replace or cancel the message later.
        conflict: The rule for an id that is already stored: "replace", "keep", "error", "earlier", "later",
            "debounce:5s", "debounce:5s:1m", "throttle:1h", "throttle:1h:last", "append", "append:50"; or an object.
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
    conflict: str | ConflictByNumberIn | None = None
    late: Literal["deliver"] | LateIn | None = None
    spread: str | None = None


class WhenIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A new due time: exactly one of `at` and `delay`."""

    at: str | None = None
    delay: str | None = None


class WhatIn(Struct, frozen=True, forbid_unknown_fields=True):
    """The lane or destination to pause or resume: an event type, a sink ("kafka") or a destination ("kafka:orders")."""

    what: str


class DeadKeyIn(Struct, frozen=True, forbid_unknown_fields=True):
    """The id and the revision of a dead letter."""

    id: str
    revision: int


class DeadKeysIn(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of at most 1,000 dead letters."""

    letters: list[DeadKeyIn]


class FilterIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A filter of messages, with the parameters of `GET /v1/messages`."""

    lane: list[str] = []
    state: str | None = None
    due_from: str | None = None
    due_to: str | None = None
    address: str | None = None
    type: str | None = None
    text: str | None = None


class DeadFilterIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A filter of dead letters, with the parameters of `GET /v1/dead`."""

    lane: list[str] = []
    reason: str | None = None
    dead_from: str | None = None
    dead_to: str | None = None
    text: str | None = None
    error: str | None = None


class BulkIn(Struct, frozen=True, forbid_unknown_fields=True):
    """An action, and the filter of the messages or dead letters to change.

    Attributes:
        messages: The filter for cancel, fire and reschedule.
        dead: The filter for redrive and purge.
        at: For reschedule: the new due time.
        delay: For reschedule, in place of `at`: the duration from the change until the new due time.
        series: For cancel: end recurring series too. Otherwise the operation leaves them unchanged.
    """

    action: Literal["cancel", "fire", "reschedule", "redrive", "purge"]
    messages: FilterIn | None = None
    dead: DeadFilterIn | None = None
    at: str | None = None
    delay: str | None = None
    series: bool = False


# --- out --------------------------------------------------------------------------------------------------


class ScheduledOut(Struct, frozen=True):
    """The outcome of a schedule request for one message.

    `repeated`: the store knows the idempotency key already, and stored nothing again. `older_in_flight` is true if the
    message replaced a version that is still being delivered.
    """

    id: str
    outcome: Literal["stored", "replaced", "kept", "in_flight", "outdated", "repeated"]
    due: str | None
    revision: int
    older_in_flight: bool | UnsetType = UNSET


class LineOut(Struct, frozen=True):
    """The answer to one line of a stream: `scheduled` or `problem`. Lines are counted from 1.

    The last answer has no `line`. It holds the totals `stored` and `refused`, and a `problem` if the stream broke off.
    """

    line: int | UnsetType = UNSET
    scheduled: ScheduledOut | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET
    stored: int | UnsetType = UNSET
    refused: int | UnsetType = UNSET


class OutcomeOut(Struct, frozen=True):
    """The outcome of a command."""

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


class _RecordHead(Struct, frozen=True):
    """The first keys of a stored record: what the message is, and what its attempts have come to."""

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


class RecordOut(_RecordHead, frozen=True):
    """The stored record of a message.

    A key is in `key` if it is UTF-8 text, and otherwise in `key_base64`. In the same way, a payload is in `payload` or
    in `payload_base64`. Lists leave the payload out. `is_cancelled` is true if the message was cancelled while it was
    in flight; no further attempt follows the present attempt. `appended` or `appended_base64`, and `appended_due`, are
    present only if a message in flight got items since its claim.
    """

    version: int | None
    every: dict[str, Any] | None
    retrying: list[str]
    debounced_since: str | None
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
    appended: str | UnsetType = UNSET
    appended_base64: str | UnsetType = UNSET
    appended_due: str | UnsetType = UNSET


class MessageOut(RecordOut, frozen=True, kw_only=True):
    """A pending message. `next_attempt` is the earliest time of the next delivery; a retry does not change `due`."""

    state: State
    next_attempt: str


class ListOut(Struct, frozen=True):
    """One page of messages.

    Attributes:
        after: Send this value as `after` to get the next page; null on the last page.
        examined: The number of messages that the request compared with the filter.
        of: The number of messages to compare in all; null if an index answers the filter.
    """

    messages: list[MessageOut]
    after: str | None
    examined: int
    of: int | None


class DeadOut(RecordOut, frozen=True, kw_only=True):
    """A dead letter, with the reason and the time at which the message was given up.

    `traceback` is the traceback of the last attempt. Lists leave it out.
    """

    reason: DeadReason
    given_up: str
    traceback: str | UnsetType | None = UNSET


class DeadListOut(Struct, frozen=True):
    """One page of dead letters, oldest first. `after`, `examined` and `of` mean the same as in `ListOut`."""

    letters: list[DeadOut]
    after: str | None
    examined: int
    of: int


class MovedOut(Struct, frozen=True):
    """The outcome of a redrive for one dead letter."""

    id: str
    revision: int
    outcome: Literal["stored", "not_found", "exists", "undecodable", "unavailable", "full", "unknown"]


class RedrivenOut(Struct, frozen=True):
    """The outcome of a redrive for each dead letter.

    `stored`: the message is scheduled again. `not_found`: there is no such dead letter. `exists`: a pending message has
    the same id. `undecodable`: the record cannot be read, so its destination is unknown.
    """

    letters: list[MovedOut]


class PurgedOut(Struct, frozen=True):
    """The number of deleted dead letters."""

    purged: int


class LaneOut(Struct, frozen=True):
    """The messages of one lane by state. `read_by_nobody` is true if no live instance serves the lane."""

    lane: str
    scheduled: int
    overdue: int
    in_flight: int
    held: int
    dead: int
    read_by_nobody: bool


class CountsOut(Struct, frozen=True):
    """The messages by lane and state, and the time since which the oldest overdue message waits."""

    lanes: list[LaneOut]
    oldest_overdue: str | None
    now: str


class LoadBucketOut(Struct, frozen=True):
    """The number of messages of a lane that come due in the bucket that begins at `from`."""

    from_: str = field(name="from")
    lane: str = ""
    messages: int = 0


class LoadOut(Struct, frozen=True):
    """The number of messages that come due in each bucket of time. Empty buckets are left out."""

    bucket: str
    buckets: list[LoadBucketOut]


class MeasuredRateOut(Struct, frozen=True):
    """A dispatch rate that was measured while messages waited: `starts` first attempts in `busy_ms`, before `until`."""

    starts: int
    busy_ms: int
    until: str


class LaneForecastOut(Struct, frozen=True):
    """How late the messages of a lane will be. `lane` is null if the request gave a rate for all lanes together.

    `messages` come due, and `overdue` messages wait now. `per_s` is the dispatch rate, in messages a second. If it is
    not known, all figures of the forecast are null.

    `late_ms` is the highest lateness. The messages of the slot that begins at `worst` have it. It is `least_late_ms` if
    the messages of each slot are due evenly over the slot. `overdue_ms` is the time until the last message starts
    that is overdue now. At `empty`, no message waits any more. With `spread`, the highest lateness is `spread_late_ms`.
    `text` is the forecast in words.
    """

    lane: str | None
    messages: int
    overdue: int
    per_s: float | None
    measured: MeasuredRateOut | None
    worst: str | None
    late_ms: int | None
    least_late_ms: int | None
    overdue_ms: int | None
    empty: str | None
    spread: str | None
    spread_late_ms: int | None
    text: str


class ForecastOut(Struct, frozen=True):
    """The forecast of each lane that has messages. `slot` is the length of the slots in which they are counted."""

    span: str
    slot: str
    forecasts: list[LaneForecastOut]


class LatenessBucketOut(Struct, frozen=True):
    """The number of messages that were at most `up_to_ms` late, but later than the bound of the bucket before.

    If `up_to_ms` is null, the bucket has no upper bound.
    """

    up_to_ms: int | None
    messages: int


class LatenessOut(Struct, frozen=True):
    """The lateness of first attempts of the last 5 minutes.

    `is_complete` is true if all journal entries of these attempts were read.
    """

    samples: int
    p50_ms: int | None
    p99_ms: int | None
    max_ms: int | None
    buckets: list[LatenessBucketOut]
    is_complete: bool


class BlockedOut(Struct, frozen=True):
    """A blocked destination: it takes no messages now."""

    to: str
    reason: str
    messages: int


class PausesOut(Struct, frozen=True):
    """The paused lanes and destinations, and the blocked destinations."""

    paused: list[str]
    blocked: list[BlockedOut]


class LimitIn(Struct, frozen=True, forbid_unknown_fields=True):
    """A limit: of each key if there is a `key`, else of all messages together. Give `concurrency`, `rate` or both.

    The `key` of a sink is "address". For a handler, it is a name for operators: only code gives messages their keys.
    """

    key: str | None = None
    concurrency: int | None = None
    rate: str | None = None


class LimitsIn(Struct, frozen=True, forbid_unknown_fields=True):
    """The new limits of a handler or sink: at most one with a key, and one without. An empty list ends the limits."""

    what: str
    limits: list[LimitIn]


class LimitOut(Struct, frozen=True):
    """A limit of a handler or sink. `rate` is a number per time, such as "5/min"."""

    what: str
    key: str | None
    concurrency: int | None
    rate: str | None


class LimitsOut(Struct, frozen=True):
    """All limits of a store."""

    limits: list[LimitOut]


class LimitedKeyOut(Struct, frozen=True, omit_defaults=True):
    """A key with messages in flight or waiting. Both `key` and `key_base64` are null if no limit has a key.

    `why` is the number that is used up: `concurrency` or `rate` of the key, or `lane` for the limit of all messages.
    `until` is the time at which a rate lets the next message begin. `since` is the time at which the first of the
    waiting messages was due.
    """

    what: str
    running: int
    waiting: int
    why: Literal["concurrency", "rate", "lane", ""]
    until: str | None
    since: str | None
    key: str | None = None
    key_base64: str | None = None


class LimitedKeysOut(Struct, frozen=True):
    """The keys of a handler or sink, most waiting messages first."""

    keys: list[LimitedKeyOut]


class ConsumerOut(Struct, frozen=True):
    """A consumer of a topic.

    `waiting` is the lag: the number of messages that the consumer has not taken yet. `seen` is the time of its last
    request. `away` is true if no message is in flight to the consumer, and the consumer has requested none for a
    minute. For a log, `cursor` is the index up to which the consumer has finished all entries.
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
    """One page of consumers, by topic, kind and name. `after` means the same as in `ListOut`."""

    consumers: list[ConsumerOut]
    after: str | None


class JournalEntryOut(Struct, frozen=True):
    """One entry of the journal: an event of a message."""

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
    """Entries of the journal, in the order of their numbers. A request with this `after` gets higher numbers."""

    entries: list[JournalEntryOut]
    after: int


class StoreOut(Struct, frozen=True):
    """A store, its optional abilities, and the destinations that are allowed."""

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
    """A schedule in the JSON form of etf1/kafka-message-scheduler: times in seconds, the value in base64."""

    id: str
    epoch: int
    timestamp: int
    topic: str
    target_topic: str
    target_key: str
    value: str | None


class Etf1Kafka(Struct, frozen=True):
    """The Kafka servers and topics of the store; empty for a store that is not Kafka."""

    bootstrap_servers: str
    topics: list[str]
    history_topic: str


class Etf1Info(Struct, frozen=True):
    """The addresses of the service, in the JSON form of etf1/kafka-message-scheduler."""

    hostname: str
    address: list[str]
    server_address: str
    kafka: Etf1Kafka


class SeriesOut(Struct, frozen=True):
    """The recurring series that match a cancel.

    Attributes:
        count: The number of series found so far.
        first: The ids of the first series found.
        included: True if the cancel ends them too; false if it leaves them unchanged.
    """

    count: int
    first: list[str]
    included: bool


class BulkPlanOut(Struct, frozen=True):
    """The plan of a bulk action. `POST /v1/bulk/{confirm}` carries it out.

    Attributes:
        count: The number of matches found so far, without recurring series.
        first: The ids of the first matches.
        series: For a cancel: the recurring series that match.
        more: True if there may be more matches. The operation finds these matches before it changes anything.
        examined: The number of messages or dead letters that the plan compared with the filter.
        of: The number of messages or dead letters to compare in all; null if an index answers the filter.
        confirm: The name of this plan, and of the operation that carries out the plan.
        expires_s: Seconds until the service forgets the plan.
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
        operation: The name of the operation: the `confirm` of its plan.
        state: `finding` the targets, then `changing` them. An operation ends as `done`, `stopped` or `failed`.
        stopping: True if a caller has stopped the operation, which ends after its current step.
        found: The number of targets found so far.
        changed: The number of targets whose outcome is known.
        outcomes: The number of targets by outcome.
        series: For a cancel: the recurring series that match.
        error: The reason of a failure.
        by: The caller that confirmed the plan.
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
