"""Computations of the page: readable payloads, charts, groups, values."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from importlib import resources

import pytest

from aiodelay import StoreUnavailableError
from aiodelay.core.values import LoadBucket
from aiodelay.operations.queries import lateness_of
from aiodelay.service.api.security import Tokens, hash_token
from aiodelay.service.api.sessions import SESSION_S, SESSIONS, Sessions
from aiodelay.service.config import Token
from aiodelay.service.page.application import HTMX
from aiodelay.service.page.charts import lateness_columns, load_bars, scale_of
from aiodelay.service.page.payload import MOST_SHOWN, viewed
from aiodelay.service.page.state import SPANS, Shared
from aiodelay.service.page.values import away, duration, number, size
from aiodelay.testing.clock import VirtualClock, VirtualLoop

# --- payloads ---------------------------------------------------------------------------------------------


def test_json_is_indented() -> None:
    payload = viewed(b'{"a":[1,"\xc3\xa9"]}')
    assert (payload.view, payload.views, payload.is_cut) == ("json", ("json", "text", "hex"), False)
    assert payload.text == json.dumps({"a": [1, "é"]}, indent=2, ensure_ascii=False)


@pytest.mark.parametrize("given", [b"plain", "\u00e9\n\ttext".encode()])
def test_text_is_shown_as_it_is(given: bytes) -> None:
    payload = viewed(given)
    assert (payload.view, payload.text, payload.views) == ("text", given.decode(), ("text", "hex"))


@pytest.mark.parametrize("given", [b"\x00\x01", b"\xff\xfe", b"a\x1bb"])
def test_bytes_are_shown_in_hex(given: bytes) -> None:
    payload = viewed(given)
    assert payload.view == "hex"
    assert payload.text.startswith(f"00000000  {given[:8].hex(' ')}")


def test_hex_has_offsets_and_text_beside_it() -> None:
    first, second = viewed(bytes(range(60, 78)), "hex").text.splitlines()
    assert first == "00000000  3c 3d 3e 3f 40 41 42 43  44 45 46 47 48 49 4a 4b  <=>?@ABCDEFGHIJK"
    assert second.split() == ["00000010", "4c", "4d", "LM"]


@pytest.mark.parametrize("view", ["json", "text", "hex"])
@pytest.mark.parametrize("given", [b'"' + b"x" * MOST_SHOWN + b'"', b"\x00" * (MOST_SHOWN + 1)])
def test_no_more_than_64_kb_is_shown(given: bytes, view: str) -> None:
    payload = viewed(given, view)
    assert payload.is_cut
    assert payload.size == len(given)
    assert len(payload.text) <= (MOST_SHOWN if payload.view != "hex" else 5 * MOST_SHOWN)


def test_json_that_grows_when_it_is_indented_is_cut() -> None:
    given = json.dumps([[1]] * 8_000).encode()
    payload = viewed(given)
    assert len(given) <= MOST_SHOWN
    assert (payload.view, payload.is_cut, len(payload.text)) == ("json", True, MOST_SHOWN)


def test_no_more_is_written_than_is_shown() -> None:
    depth, items = 900, 20_000
    given = ("[" * depth + ",".join("0" * items) + "]" * depth).encode()
    tracemalloc.start()
    try:
        assert viewed(given).view == "json"
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 4_000_000, "indented, it has 36 MB"


def test_what_is_nested_too_deeply_is_text() -> None:
    assert viewed(b"[" * 30_000 + b"]" * 30_000).view == "text"


def test_a_character_cut_in_two_is_text_still() -> None:
    given = b"x" * (MOST_SHOWN - 1) + "\u00e9".encode() * 4
    assert viewed(given).view == "text"


# --- charts -------------------------------------------------------------------------------------------------


def test_bars_stand_where_messages_come_due() -> None:
    span, now = SPANS["hour"], 1_000_000
    load = [LoadBucket(now, "a", 1), LoadBucket(now, "b", 3), LoadBucket(now + 59 * 60_000, "a", 2)]
    chart = load_bars(load, span, now)
    assert [(bar.x, bar.count, bar.height, bar.y, bar.is_peak) for bar in chart.bars] == [
        (0, 4, 100, 0, True),
        (59, 2, 50, 50, False),
    ]
    assert (chart.total, chart.width, chart.ticks[0], chart.ticks[-1]) == (6, 60, now, now + 3_600_000)
    assert "4 (b 3, a 1)" in chart.bars[0].title


def test_nothing_coming_is_no_bar() -> None:
    chart = load_bars([], SPANS["month"], 0)
    assert (list(chart.bars), chart.peak, chart.total) == ([], None, 0)


@pytest.mark.parametrize(
    ("samples", "p50", "p99"),
    [([0], 0, 0), ([1] * 99 + [2], 0, 0), ([3] * 50 + [9] * 50, 2, 3), ([5_000_000] * 3, 16, 16)],
)
def test_the_columns_that_hold_p50_and_p99(samples: list[int], p50: int, p99: int) -> None:
    columns = lateness_columns(lateness_of(samples, is_complete=True)).columns
    assert [column.x for column in columns if "p50" in column.holds] == [p50]
    assert [column.x for column in columns if "p99" in column.holds] == [p99]
    assert sum(column.count for column in columns) == len(samples)


@pytest.mark.parametrize(
    ("most", "scale"),
    [
        (0, [1, 0]),
        (1, [1, 0]),
        (4, [4, 3, 2, 1, 0]),
        (11, [15, 10, 5, 0]),
        (41, [60, 40, 20, 0]),
        (1000, [1000, 500, 0]),
    ],
)
def test_a_scale_has_round_numbers_up_to_the_most(most: int, scale: list[int]) -> None:
    assert list(scale_of(most)) == scale


# --- values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (1_500, "1.5 s"),
        (59_999, "59 s"),
        (61_000, "1 min 1 s"),
        (2_339_000, "38 min"),
        (90_000_000, "1 d 1 h"),
    ],
)
def test_lengths_of_time(ms: int, text: str) -> None:
    assert duration(ms).replace("\u00a0", " ") == text
    assert away(ms, 0).replace("\u00a0", " ") == (f"in {text}" if ms else "now")


def test_numbers_and_sizes() -> None:
    assert number(1_234_567) == "1\u202f234\u202f567"
    assert [size(each).replace("\u00a0", " ") for each in (0, 1_023, 1_024, 1 << 21)] == [
        "0 B",
        "1023 B",
        "1.0 kB",
        "2.0 MB",
    ]


# --- sessions -----------------------------------------------------------------------------------------------


def test_a_session_ends_with_its_time_with_its_token_and_when_there_are_too_many() -> None:
    clock = VirtualClock()
    token = Token(name="a", hash=hash_token("secret"), scopes=("read",))
    tokens = Tokens([token])
    sessions = Sessions(tokens, clock)
    assert sessions.begin("other") is None
    begun = sessions.begin("secret")
    assert begun is not None
    cookie, found = begun
    assert found == token == sessions.find(cookie)
    clock.move(SESSION_S * 1000)
    assert sessions.find(cookie) == token
    clock.move(1)
    assert sessions.find(cookie) is None

    cookie, _ = sessions.begin("secret") or ("", None)
    tokens.load([])
    assert sessions.find(cookie) is None
    tokens.load([token])
    assert sessions.find(cookie) == token
    sessions.end(cookie)
    assert sessions.find(cookie) is None

    cookie, _ = sessions.begin("secret") or ("", None)
    for _ in range(SESSIONS):
        sessions.begin("secret")
    assert sessions.find(cookie) is None


def test_what_a_form_brings_along_is_of_one_session() -> None:
    one, other = Sessions(Tokens()), Sessions(Tokens())
    assert one.is_csrf("cookie", one.csrf("cookie"))
    assert not one.is_csrf("another", one.csrf("cookie"))
    assert not one.is_csrf("cookie", other.csrf("cookie"))
    assert not one.is_csrf("cookie", "")
    assert not one.is_csrf("cookie", "é")


# --- what comes from elsewhere ------------------------------------------------------------------------------


def test_htmx_is_of_the_version_that_is_named() -> None:
    vendored = resources.files("aiodelay.service.page") / "static" / "vendor"
    names = sorted(each.name for each in vendored.iterdir())
    assert names == ["LICENSE-htmx.txt", "htmx.min.js", "hx-sse.min.js"]
    assert f'version="{HTMX}"' in (vendored / "htmx.min.js").read_text(encoding="utf-8")


# --- answers that viewers share -----------------------------------------------------------------------------


def test_a_store_is_asked_once_a_second_whatever_it_answers() -> None:
    shared, asked = Shared(), list[float]()

    async def fails() -> None:
        asked.append(asyncio.get_running_loop().time())
        raise StoreUnavailableError("redis://", "away")

    async def ask_often() -> None:
        for _ in range(30):
            with pytest.raises(StoreUnavailableError):
                await shared.get("facts", fails)
            await asyncio.sleep(0.1)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(ask_often())
    assert len(asked) == 3
