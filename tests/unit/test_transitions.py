"""The pure part of every store: values and a time in, values out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aiodelay.core import transitions as t
from aiodelay.core.conflicts import Verdict, put_verdict
from aiodelay.core.values import (
    MAX_LEASE_MS,
    After,
    Again,
    At,
    Conflict,
    Dead,
    Envelope,
    Late,
    LateAction,
    Put,
    Record,
    Refused,
    Stored,
)

NOW = 1_900_000_000_000
OP = b"12345678"
RULE: Mapping[str, str | int] = {"e": 60_000}

times = st.integers(t.TOKEN_EPOCH_MS, t.TOKEN_EPOCH_MS + 69 * 365 * 86_400_000)
ids = st.text(min_size=1, max_size=20)


def verdict_of(
    conflict: Conflict, rule: object, current: Record | None, *, in_flight: bool, ended_version: int | None
) -> Verdict | Refused:
    return put_verdict(
        conflict, rule, current, in_flight=in_flight, ended_version=ended_version, due_ms=NOW, now_ms=NOW
    )


def record(**state: object) -> Record:
    of_envelope = {name: state.pop(name) for name in ("rule", "version") if name in state}
    envelope = Envelope("m", "lane", payload=b"p", **of_envelope)  # type: ignore[arg-type]
    return Record(envelope, state.pop("revision", NOW), state.pop("due_ms", NOW), OP, **state)  # type: ignore[arg-type]


# --- tokens -----------------------------------------------------------------------------------------------


@given(times, st.integers(0, 10**6))
def test_tokens_tell_deadline_and_counter(deadline_ms: int, counter: int) -> None:
    token = t.token_for(deadline_ms, counter)
    assert (t.token_deadline_ms(token), t.token_counter(token)) == (deadline_ms, counter % 4096)
    assert float(token) == token  # exact as a score of Redis


@given(times, times)
def test_tokens_of_one_instant_differ_and_sort_by_deadline(one: int, other: int) -> None:
    assert t.token_for(one, 1) != t.token_for(one, 2)
    assert (t.token_for(one, 4095) < t.token_for(other, 0)) == (one < other)


@pytest.mark.parametrize(
    ("ends_in_ms", "is_over"),
    [(-1, True), (0, True), (1, False), (MAX_LEASE_MS, False), (MAX_LEASE_MS + 1, False), (3_600_000, False)],
)
def test_a_lease_is_over_at_its_end_and_may_be_too_long(ends_in_ms: int, is_over: bool) -> None:
    token = t.token_for(NOW + ends_in_ms, 7)
    is_too_long = ends_in_ms > MAX_LEASE_MS
    assert (t.is_lease_over(token, NOW), t.is_lease_too_long(token, NOW)) == (is_over, is_too_long)
    least, too_long = t.tokens_held(NOW)
    assert (token < least, token >= too_long) == (is_over, is_too_long)


@pytest.mark.parametrize(
    ("ago_ms", "is_same_step"),
    [(-1, False), (0, True), (t.RIGHTING_MS, True), (2 * t.RIGHTING_MS, True), (2 * t.RIGHTING_MS + 1, False)],
)
def test_leases_that_are_too_long_have_been_seen_since_the_last_step_of_the_clock(
    ago_ms: int, is_same_step: bool
) -> None:
    assert t.ahead_since(NOW - ago_ms, NOW) == (NOW - ago_ms if is_same_step else NOW)


# --- ids --------------------------------------------------------------------------------------------------


@given(ids, st.integers(0, 2**48 - 1))
def test_occurrence_ids_can_be_taken_apart(series: str, due_ms: int) -> None:
    occurrence = t.occurrence_id(series, due_ms)
    assert t.occurrence_of(occurrence) == (series, due_ms)
    assert t.base_id(occurrence) == series


@pytest.mark.parametrize("message_id", ["m", "", "a~b", "a~123", "~", "a~12345678901x", "1234567890"])
def test_other_ids_name_no_occurrence(message_id: str) -> None:
    assert t.occurrence_of(message_id) is None
    assert t.base_id(message_id) == message_id


def test_an_occurrence_has_its_series_delivery_id() -> None:
    series = record(rule=RULE)
    assert t.delivery_id(series) == f"m/{NOW}/{NOW}"
    assert t.delivery_id(t.as_occurrence(series)) == t.delivery_id(series)


def test_a_redriven_occurrence_is_told_apart_by_the_time_at_which_it_was_due_first() -> None:
    occurrence = t.as_occurrence(record(rule=RULE))
    assert t.delivery_id(t.redriven(occurrence, t.NO_OP, NOW + 100, NOW + 90)) == f"m/{NOW + 100}/{NOW}"


# --- puts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "revision"), [(None, NOW), (NOW - 5, NOW), (NOW, NOW + 1), (NOW + 5, NOW + 6)])
def test_revisions_are_the_time_or_one_more_than_the_last(last: int | None, revision: int) -> None:
    assert t.next_revision(NOW, last) == revision


@pytest.mark.parametrize(
    ("due", "due_ms"), [(After(5), NOW + 5), (At(NOW - 5), NOW - 5), (At(NOW + 5), NOW + 5), (At(-1), 0)]
)
def test_due_of(due: At | After, due_ms: int) -> None:
    assert t.due_of(due, NOW) == due_ms


@pytest.mark.parametrize(
    ("late", "expires_ms", "action"),
    [
        (Late.deliver(), 0, LateAction.DELIVER),
        (Late.drop("1s"), NOW + 1010, LateAction.DROP),
        (Late.dead_letter("0s"), NOW + 10, LateAction.DEAD_LETTER),
    ],
)
def test_record_of_a_put(late: Late, expires_ms: int, action: LateAction) -> None:
    put = Put(OP, Envelope("m", "lane"), After(10), late=late)
    made = t.record_of(put, NOW + 10, NOW)
    assert made == Record(put.envelope, NOW, NOW + 10, OP, expires_ms, action)
    assert t.first_answer(made) == Stored("stored", NOW, NOW + 10)


@pytest.mark.parametrize(
    ("mode", "in_flight", "verdict"),
    [
        ("replace", False, "replaced"),
        ("replace", True, "replaced"),
        ("keep", False, "kept"),
        ("keep", True, "in_flight"),
        ("error", False, Refused("duplicate")),
        ("error", True, Refused("duplicate")),
    ],
)
def test_put_verdict_on_a_stored_message(mode: str, in_flight: bool, verdict: object) -> None:
    current, conflict = record(), Conflict(mode)  # type: ignore[arg-type]
    assert verdict_of(conflict, None, current, in_flight=in_flight, ended_version=None) == verdict
    assert verdict_of(conflict, None, None, in_flight=False, ended_version=None) == "stored"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [(RULE, dict(RULE), "kept"), (RULE, {"e": 1}, "replaced"), (None, RULE, "kept"), (RULE, None, "kept")],
)
def test_keep_gives_way_only_to_another_rule(old: Mapping[str, str | int], new: object, verdict: str) -> None:
    current = record(rule=old)
    assert verdict_of(Conflict.keep(), new, current, in_flight=False, ended_version=None) == verdict


@pytest.mark.parametrize(
    ("current", "verdict"),
    [
        (record(), "replaced"),
        (
            record(revision=NOW + 1),
            Refused("outdated", f"not revision {NOW}; revision {NOW + 1} stands", NOW + 1, NOW),
        ),
        (None, Refused("outdated", f"not revision {NOW}; nothing stands")),
    ],
)
def test_if_revision_compares_with_what_stands(current: Record | None, verdict: object) -> None:
    conflict = Conflict.if_revision(NOW)
    assert verdict_of(conflict, None, current, in_flight=False, ended_version=None) == verdict


@pytest.mark.parametrize("stored", [None, 3, 7])
@pytest.mark.parametrize("ended", [None, 3, 7])
@pytest.mark.parametrize("is_there", [False, True])
def test_newer_compares_with_all_that_is_known(stored: int | None, ended: int | None, is_there: bool) -> None:
    current = record(version=stored) if is_there else None
    known = max((v for v in (stored if is_there else None, ended) if v is not None), default=-1)
    for version in range(10):
        verdict = verdict_of(Conflict.newer(version), None, current, in_flight=False, ended_version=ended)
        if version > known:
            assert verdict == ("replaced" if is_there else "stored")
        else:
            why = f"version {version} is not newer than {known}"
            standing = Refused("outdated", f"{why}; revision {NOW} stands", NOW, NOW)
            assert verdict == (standing if is_there else Refused("outdated", f"{why}; nothing stands"))


# --- due times --------------------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.one_of(st.none(), st.integers(0, 10**6)), st.integers(0, 2**40))
def test_moved_takes_the_lateness_limit_along(due_ms: int, limit_ms: int | None, new_ms: int) -> None:
    late: dict[str, object] = {} if limit_ms is None else {"late": LateAction.DROP, "expires_ms": due_ms + limit_ms}
    moved = t.moved(record(due_ms=due_ms, **late), new_ms)
    assert moved.due_ms == new_ms
    if limit_ms is not None:
        assert moved.expires_ms == (new_ms + limit_ms if due_ms + limit_ms else 0)


def test_a_move_keeps_the_delivery_id_of_all_but_a_series() -> None:
    one = t.moved(t.moved(record(), NOW + 5), NOW + 9)
    assert (t.delivery_id(one), t.put_due_of(t.delivery_id(one), one.due_ms)) == (f"m/{NOW}/{NOW}", NOW)
    assert t.delivery_id(t.fired(one, NOW + 7)) == f"m/{NOW}/{NOW}"
    assert t.delivery_id(t.moved(record(rule=RULE), NOW + 5)) == f"m/{NOW}/{NOW + 5}"
    assert t.put_due_of("of/somebody/else", NOW) is None


def test_moved_steps_over_occurrences_that_are_being_retried() -> None:
    series = record(rule=RULE, live=(NOW + 5, NOW + 6, NOW + 9))
    assert t.moved(series, NOW + 5).due_ms == NOW + 7
    assert t.moved(series, NOW + 8).due_ms == NOW + 8


@pytest.mark.parametrize(("due_ms", "fired_ms"), [(NOW - 5, NOW - 5), (NOW, NOW), (NOW + 5, NOW)])
def test_fired_is_due_now_at_the_latest(due_ms: int, fired_ms: int) -> None:
    assert t.fired(record(due_ms=due_ms), NOW).due_ms == fired_ms


@pytest.mark.parametrize("action", list(LateAction))
@pytest.mark.parametrize("rule", [None, RULE])
@pytest.mark.parametrize("over_ms", [0, 1])
def test_late(action: LateAction, rule: Mapping[str, str | int] | None, over_ms: int) -> None:
    one = record(rule=rule, late=action, expires_ms=NOW)
    is_late = action is not LateAction.DELIVER and over_ms > 0
    assert t.is_late(one, NOW + over_ms) is is_late
    assert t.ends_by_itself(one, NOW + over_ms) is (is_late and rule is None)


# --- attempts ---------------------------------------------------------------------------------------------


def test_attempts_keep_the_first_error_and_the_last() -> None:
    one = record(lapses=2, kills=1, alone=True)
    for attempt, error in [(1, "a"), (2, None), (3, "b")]:
        one = t.after_failure(one, Again("m", NOW, 1, NOW, attempt, error))
    assert (one.attempt, one.first_error, one.last_error) == (3, "a", "b")
    assert (one.lapses, one.kills, one.alone) == (0, 0, False)
    dead = t.after_failure(one, Dead("m", NOW, 1, "rejected", 4))
    assert (dead.attempt, dead.first_error, dead.last_error) == (4, "a", "b")


def test_attempts_keep_the_last_errors_each_once_in_a_row() -> None:
    one = record()
    for attempt, error in enumerate(["a", "b", "b", None, "c", "b", "d", "e"], start=1):
        one = t.after_failure(one, Again("m", NOW, 1, NOW, attempt, error))
    assert (one.first_error, one.earlier_errors, one.last_error) == ("a", ("b", "c", "b", "d"), "e")


def test_only_a_dead_letter_has_a_traceback() -> None:
    dead = t.after_failure(record(), Dead("m", NOW, 1, "rejected", 4, "e", traceback="lines"))
    assert dead.traceback == "lines"
    assert t.after_failure(dead, Again("m", NOW, 1, NOW, 5, "e")).traceback is None
    assert t.redriven(dead, bytes(8), NOW, NOW).traceback is None


@pytest.mark.parametrize(("asked_ms", "place_ms"), [(NOW - 1, NOW), (NOW, NOW), (NOW + 1, NOW + 1)])
def test_a_retry_never_stands_before_its_due_time(asked_ms: int, place_ms: int) -> None:
    assert t.retry_place(record(), asked_ms) == place_ms


# --- lapses -----------------------------------------------------------------------------------------------


def test_two_lapses_make_a_suspect_and_three_more_alone_a_killer() -> None:
    one, seen = record(), []
    for _ in range(4):
        seen.append((t.is_suspect(one), one.kills))
        is_suspect = t.is_suspect(one)
        lapsed = t.after_lapse(replace(one, alone=is_suspect), is_tried=is_suspect, has_died=True)
        assert isinstance(lapsed, Record)
        assert not lapsed.alone
        one = lapsed
    assert seen == [(False, 0), (False, 0), (True, 0), (True, 1)]
    assert t.after_lapse(replace(one, alone=True), is_tried=True, has_died=True) == "killed_worker"
    for alone, has_died in ((False, True), (True, False)):
        lapsed = t.after_lapse(replace(one, alone=alone), is_tried=True, has_died=has_died)
        assert isinstance(lapsed, Record)
        assert (lapsed.kills, lapsed.lapses) == (one.kills, one.lapses)


@pytest.mark.parametrize("state", [{"rule": RULE}, {"no_retry": True}])
def test_some_killers_are_not_given_up_by_the_store(state: dict[str, object]) -> None:
    lapsed = t.after_lapse(record(lapses=4, kills=2, alone=True, **state), is_tried=True, has_died=True)
    assert isinstance(lapsed, Record)
    assert (t.is_killer(lapsed), lapsed.lapses) == (True, 4)


@pytest.mark.parametrize(
    ("ago_ms", "is_silent"), [(0, False), (3999, False), (4000, True), (-3999, False), (-4000, True)]
)
def test_a_suspect_is_left_to_its_process_for_four_leases(ago_ms: int, is_silent: bool) -> None:
    assert t.is_silent(NOW - ago_ms, 1000, NOW) is is_silent


@pytest.mark.parametrize(("ago_ms", "died"), [(1999, False), (2000, True), (-1999, False), (-2000, True)])
def test_a_silent_process_has_ended_if_it_was_not_seen_for_two_leases(ago_ms: int, died: bool) -> None:
    assert t.has_died(NOW - ago_ms, 1000, NOW) is died


def test_counters_stop_at_what_a_byte_holds() -> None:
    lapsed = t.after_lapse(record(rule=RULE, lapses=255, kills=255, alone=True), is_tried=False, has_died=True)
    assert isinstance(lapsed, Record)
    assert (lapsed.lapses, lapsed.kills) == (255, 255)


def test_after_a_trial_the_lapses_count_on() -> None:
    suspect = t.after_trial(record(lapses=2, kills=1, alone=True))
    assert (suspect.lapses, suspect.kills, suspect.alone) == (2, 1, False)
    other = record(lapses=2)
    assert t.after_trial(other) is other


@pytest.mark.parametrize(
    ("lapses", "seconds"), [(2, 1), (3, 2), (4, 4), (5, 8), (6, 16), (7, 32), (8, 60), (9, 60), (255, 60)]
)
def test_a_trial_lasts_twice_as_long_after_each_lapse(lapses: int, seconds: int) -> None:
    assert t.trial_ms(record(lapses=lapses)) == seconds * 1000


def test_half_of_those_that_hold_a_killer_are_tried_next_and_all_once_none_are_known_to() -> None:
    search, seen = t.Trials(), []
    for left in (24, 0, 11, 0, 0, 1, 0, 0):  # how many are held when the process ends; 0: they come through
        size = min(search.most, 24)
        seen.append(size)
        search = search.begun(size)
        for lapsing in range(left, 0, -1):
            search = search.died(lapsing)
    assert seen == [24, 12, 6, 6, 3, 1, 1, 24]


# --- series -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("retrying", [True, False])
def test_rearmed_is_fresh_and_lists_what_is_retried(retrying: bool) -> None:
    series = record(
        rule=RULE,
        late=LateAction.DROP,
        expires_ms=NOW + 5,
        attempt=2,
        lapses=3,
        kills=3,
        alone=True,
        live=(NOW - 9,),
        first_error="a",
        earlier_errors=("a",),
        last_error="b",
    )
    live = (NOW - 9, NOW) if retrying else (NOW - 9,)
    expected = record(rule=RULE, due_ms=NOW + 60, late=LateAction.DROP, expires_ms=NOW + 65, live=live)
    assert t.rearmed(series, NOW + 60, retrying=retrying) == expected


def test_rearmed_at_its_own_due_time_does_not_share_it_with_the_retry() -> None:
    assert t.rearmed(record(rule=RULE), NOW, retrying=True).due_ms == NOW + 1


def test_an_occurrence_is_a_record_of_its_own() -> None:
    series = record(rule=RULE, attempt=1, live=(1,), first_error="a", expires_ms=NOW + 5, late=LateAction.DROP)
    one = t.as_occurrence(series)
    assert (one.id, one.envelope.rule, one.live, one.op) == (t.occurrence_id("m", NOW), None, (), t.NO_OP)
    assert (one.revision, one.due_ms, one.attempt, one.first_error) == (NOW, NOW, 1, "a")
    assert (one.expires_ms, one.late, one.envelope.payload) == (NOW + 5, LateAction.DROP, b"p")


def test_redriven_is_a_new_life() -> None:
    state: dict[str, object] = {
        "attempt": 5,
        "lapses": 2,
        "kills": 3,
        "first_error": "a",
        "last_error": "b",
        "no_retry": True,
    }
    old = record(late=LateAction.DROP, expires_ms=NOW + 5, **state)
    new = t.redriven(old, t.NO_OP, NOW + 100, NOW + 90)
    assert new == Record(old.envelope, NOW + 100, NOW + 90, t.NO_OP, NOW + 95, LateAction.DROP)


# --- what a source gave out -------------------------------------------------------------------------------


def again(due_ms: int, attempt: int, error: str | None = None) -> Again:
    return Again("m", NOW, 1, due_ms, attempt, error)


def test_a_message_of_a_source_that_was_never_run_is_released() -> None:
    taken = record(attempt=1)
    assert t.is_release(taken, again(NOW, 1))
    assert not t.is_release(taken, again(NOW, 2)), "an attempt"
    assert not t.is_release(taken, again(NOW + 1, 1)), "for later"
    assert not t.is_release(taken, again(NOW, 1, "an error"))
    assert not t.is_release(taken, Dead("m", NOW, 1, "rejected", 1))


def test_a_message_of_a_source_goes_back_to_a_store_with_its_attempt() -> None:
    retried = t.returned(record(), again(NOW + 500, 1, "an error"))
    assert (retried.record.attempt, retried.record.last_error) == (1, "an error")
    assert (retried.record.due_ms, retried.due_ms, retried.reason) == (NOW, NOW + 500, None)
    dead = t.returned(record(attempt=2), Dead("m", NOW, 1, "rejected", 3, "why"))
    assert (dead.record.attempt, dead.record.last_error) == (3, "why")
    assert (dead.due_ms, dead.reason) == (NOW, "rejected")
