"""The JSON of a delay box's requests: valid forms, and every way to get it wrong."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.backends.kafka.topics.requests import BadRequestError, Rules, read_request
from aiodelay.core.conflict_text import read_conflict
from aiodelay.core.durations import MAX_HORIZON_MS
from aiodelay.core.values import After, At, Conflict, Put
from tests.support.bad_requests import ARTICLE, BAD, with_field
from tests.support.clear_errors import PYTHON_WORDS

NOW = 1_800_000_000_000
WRITTEN = NOW - 60_000
RULES = Rules(frozenset({"T"}), from_arrival=False, max_payload=1000)


def read(
    text: str | bytes | None,
    headers: list[tuple[str, bytes | None]] | None = None,
    rules: Rules = RULES,
    written_ms: int = WRITTEN,
) -> Put:
    value = text.encode() if isinstance(text, str) else text
    return read_request(value, headers or [], rules, own_id="own", written_ms=written_ms, now_ms=NOW)


def test_the_articles_request_with_its_header() -> None:
    put = read(ARTICLE, [("CALLER_SERVICE", b"S")])
    envelope = put.envelope
    assert (envelope.lane, envelope.address, envelope.payload) == ("kafka", "T", b"<message body>")
    assert (envelope.id, envelope.key, dict(envelope.headers)) == ("own", None, {"CALLER_SERVICE": b"S"})
    assert put.due == At(WRITTEN + 120_000)


def test_a_countdown_from_arrival_is_the_stores_to_count() -> None:
    assert read(ARTICLE, rules=RULES._replace(from_arrival=True)).due == After(120_000)
    assert read(ARTICLE, written_ms=-1).due == After(120_000), "the record has no time"


@pytest.mark.parametrize(
    ("written", "ms"),
    [
        ("0", 0),
        ("-0.0", 0),
        ("0.001", 1),
        ("0.0001", 1),
        ("1.1", 1100),
        ("2.675", 2675),
        ("1e2", 100_000),
        ("1E-30", 1),
        ("315360000", MAX_HORIZON_MS),
    ],
)
def test_a_countdown_is_exact_and_rounded_up(written: str, ms: int) -> None:
    assert read(with_field("countdown", written), written_ms=NOW).due == At(NOW + ms)


@given(st.decimals(0, 10**8, allow_nan=False, allow_infinity=False, places=9))
def test_s1_no_countdown_is_shortened(countdown: object) -> None:
    due = read(with_field("countdown", f"{countdown:f}")).due
    assert isinstance(due, At)
    assert 0 <= due.ms - WRITTEN - Fraction(f"{countdown:f}") * 1000 < 1


def test_an_instant() -> None:
    at = datetime(2027, 3, 1, 12, 0, 0, 500, UTC)
    ms = (at - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=1)
    assert read(with_field("at", f'"{at.isoformat()}"')).due == At(int(ms) + 1)
    assert read(with_field("at", '"2001-01-01T00:00:00Z"')).due == At(978_307_200_000), "past: it is due now"


@pytest.mark.parametrize(
    ("message", "payload"),
    [
        ('"é \\u2713 \\n"', "é ✓ \n".encode()),
        ('""', b""),
        ('{"b": 1.50,  "a": [1e400, 12345678901234567890]}', b'{"b": 1.50,  "a": [1e400, 12345678901234567890]}'),
        ("[1, {}]", b"[1, {}]"),
        ('{"a": 1, "a": 2}', b'{"a": 1, "a": 2}'),
    ],
)
def test_a_message_goes_out_as_it_is_written(message: str, payload: bytes) -> None:
    assert read(with_field("message", message)).envelope.payload == payload


def test_what_goes_beyond_the_article() -> None:
    request = {"topic": "T", "message": "m", "at": "2027-01-01T00:00:00+01:00", "id": "é", "key": "k é"}
    headers = {"CALLER_SERVICE": "other", "new": "ü"}
    carried = [("CALLER_SERVICE", b"S"), ("null", None), ("kept", b"\xff"), ("aiodelay-delivery-id", b"1")]
    envelope = read(json.dumps({**request, "headers": headers}), [*carried, ("scheduler-key", b"2")]).envelope
    assert (envelope.id, envelope.key) == ("é", "k é".encode())
    expected = {"CALLER_SERVICE": b"other", "new": "ü".encode(), "kept": b"\xff", "null": b""}
    assert dict(envelope.headers) == expected


def test_null_is_as_good_as_left_out() -> None:
    request = '{"topic": "T", "message": "m", "countdown": 1, "at": null, "id": null, "key": null, "headers": null}'
    envelope = read(request).envelope
    assert (envelope.id, envelope.key, dict(envelope.headers)) == ("own", None, {})


@pytest.mark.parametrize(("text", "reason"), BAD, ids=range(len(BAD)))
def test_a_bad_request_is_refused_with_its_reason(text: str | bytes | None, reason: str) -> None:
    with pytest.raises(BadRequestError, match=r".*") as caught:
        read(text)
    assert reason in str(caught.value)
    assert not PYTHON_WORDS.search(str(caught.value))
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda each: (
            st.lists(each)
            | st.dictionaries(
                st.sampled_from(["topic", "message", "countdown", "at", "id", "key", "headers", "x"]), each
            )
        ),
    )
)
def test_any_json_is_a_request_or_refused(value: object) -> None:
    with suppress(BadRequestError):
        read(json.dumps(value))


@given(
    st.fixed_dictionaries(
        {"topic": st.just("T") | st.text(), "message": st.text(), "countdown": st.integers(-1, 10**9) | st.none()},
        optional={
            "id": st.text() | st.none(),
            "key": st.text() | st.integers(),
            "at": st.none() | st.text(),
            '"': st.none(),
        },
    ),
    st.booleans(),
)
def test_a_request_of_texts_and_numbers_is_read_as_one_with_an_object(
    request: dict[str, object], is_ascii: bool
) -> None:
    text = json.dumps(request, ensure_ascii=is_ascii)
    assert _outcome(text) == _outcome(f'{text[:-1]}, "headers": {{}}}}')


def _outcome(text: str) -> Put | str:
    try:
        return read(text.encode("utf-8", "surrogatepass"))
    except BadRequestError as error:
        return str(error)


@pytest.mark.parametrize("name", ["topic", "\\u0074opic"])
def test_a_repeated_name_is_noticed_however_it_is_written(name: str) -> None:
    with pytest.raises(BadRequestError, match="the field 'topic' more than once"):
        read(f'{{"{name}": "T", "message": "\\"", "countdown": 1, "topic": "T"}}')


@given(st.binary(max_size=50))
def test_any_bytes_are_a_request_or_refused(value: bytes) -> None:
    with suppress(BadRequestError):
        read(value)


def test_record_headers_that_cannot_travel_are_refused() -> None:
    with pytest.raises(BadRequestError, match="header name is 'a b'"):
        read(ARTICLE, [("a b", b"1")])
    with pytest.raises(BadRequestError, match="at most 64"):
        read(ARTICLE, [(f"h{i}", b"") for i in range(65)])
    with pytest.raises(BadRequestError, match="not UTF-8"):
        read(ARTICLE, [("\udcff", b"1")])


@pytest.mark.parametrize("text", ["replace", "keep", "earlier", "later", "throttle:1h", "throttle:1h:last"])
def test_a_header_names_a_conflict_rule(text: str) -> None:
    put = read(with_field("id", '"m"'), [("aiodelay-conflict", text.encode())])
    assert (put.conflict, put.due, put.envelope.headers) == (read_conflict(text), At(WRITTEN + 1000), {})


def test_a_debounced_request_has_no_due_time_of_its_own() -> None:
    headers: list[tuple[str, bytes | None]] = [("aiodelay-conflict", b"debounce:5s:1m")]
    put = read('{"topic": "T", "message": "m", "id": "m"}', headers)
    assert (put.conflict, put.due) == (Conflict.debounce("5s", "1m"), After(5000))
    with pytest.raises(BadRequestError, match="the conflict rule debounce gives the due time"):
        read(with_field("id", '"m"'), headers)


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (b"error", "its conflict rule is error; here a request may have: debounce, earlier, keep"),
        (b"newer:7", "its conflict rule is newer"),
        (b"if_revision:7", "its conflict rule is if_revision"),
        (b"newest", "conflict is 'newest'"),
        (b"\xff", "conflict is"),
        (None, "conflict is ''"),
        (b"debounce:5", "conflict.quiet is '5'"),
    ],
)
def test_a_wrong_conflict_rule_is_refused(written: bytes | None, why: str) -> None:
    with pytest.raises(BadRequestError, match=why):
        read(with_field("id", '"m"'), [("aiodelay-conflict", written)])


def test_a_conflict_rule_needs_an_id_and_a_store_that_knows_it() -> None:
    with pytest.raises(BadRequestError, match="it has a conflict rule and no id"):
        read(ARTICLE, [("aiodelay-conflict", b"keep")])
    with pytest.raises(BadRequestError, match="its conflict rule is earlier; here a request may have: keep, replace"):
        read(
            with_field("id", '"m"'), [("aiodelay-conflict", b"earlier")], RULES._replace(conflicts=["replace", "keep"])
        )
