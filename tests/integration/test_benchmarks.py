"""The logic of the benchmarks, and that each works and verifies its results. Speed is not tested."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis import Redis

from aiodelay.core.event_codecs import JSON
from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.bd9_spark_break_even import break_even
from benchmarks.harness import (
    PAYLOAD_BYTES,
    Benchmark,
    Goal,
    Plan,
    Row,
    Stopwatch,
    WrongResultError,
    check,
    check_once_each,
    in_turn,
    median_interval,
    number_of,
    order,
    per_message_us,
    quantile,
    ratios,
    raw_payload,
)
from benchmarks.redis_server import running_server
from benchmarks.report import as_json, as_line, as_markdown, put_between_markers, surroundings

AT_LEAST_HALF = Goal("at least", 0.5)


def row(*values: float, goal: Goal | None = AT_LEAST_HALF) -> Row:
    return Row("BF0", "nothing at all", "x bare", values, goal, "2 µs, bare 1 µs")


def counting(figures: list[str], name: str) -> Callable[[], float]:
    def measure() -> float:
        figures.append(name)
        return len(figures)

    return measure


# --- figures ----------------------------------------------------------------------------------------------


def test_a_row_shows_the_median_and_the_spread_of_its_rounds() -> None:
    assert row(0.9, 0.1, 0.4).median == 0.4
    assert row(0.9, 0.1, 0.4, 0.6).median == 0.5
    assert row(0.9, 0.1, 0.4).spread == (0.1, 0.9)


@pytest.mark.parametrize(
    ("goal", "median", "met"),
    [
        (Goal("at least", 0.5), 0.5, True),
        (Goal("at least", 0.5), 0.499, False),
        (Goal("at most", 1.5), 1.5, True),
        (Goal("at most", 1.5), 1.501, False),
        (None, 0.0, None),
    ],
)
def test_a_goal_is_met_by_the_median(goal: Goal | None, median: float, met: bool | None) -> None:
    assert row(median - 0.1, median, median + 0.1, goal=goal).is_met is met


def test_a_goal_is_met_by_the_whole_interval_of_many_rounds() -> None:
    surely, perhaps = [0.4] * 9 + [0.6] * 21, [0.4] * 10 + [0.6] * 20
    assert row(*surely, goal=Goal("at least", 0.5)).is_met
    assert not row(*perhaps, goal=Goal("at least", 0.5)).is_met
    assert row(*perhaps[:-1], goal=Goal("at least", 0.5)).is_met  # 29 rounds: the median alone counts
    assert "0.60 [0.40-0.60], 95 % 0.40-0.60" in as_markdown([row(*perhaps, goal=None)], {})


def test_the_times_of_a_stopwatch_come_with_its_processor_time(tmp_path: Path) -> None:
    def timed() -> float:
        with Stopwatch() as watch:
            sum(range(10_000))
        return watch.seconds

    figures = in_turn(Plan(tmp_path, runs=2), {"timed": timed, "untimed": lambda: 0.5})
    assert len(figures["timed"].processor) == 2
    assert not figures["untimed"].processor
    assert "(processor " in per_message_us(figures["timed"], 1)
    assert per_message_us(figures["untimed"], 1) == "500000.0 µs"


def test_ratios_compare_the_times_of_one_round() -> None:
    assert ratios([1.0, 3.0], [2.0, 2.0]) == (0.5, 1.5)
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [2.0, 2.0])


@pytest.mark.parametrize(("n", "least", "greatest"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (30, 10, 21), (100, 40, 61)])
def test_the_interval_of_a_median_is_of_order_statistics(n: int, least: int, greatest: int) -> None:
    assert median_interval(range(n, 0, -1)) == (least, greatest)


@pytest.mark.parametrize(("part", "value"), [(0.0, 1), (0.5, 51), (0.99, 100), (1.0, 100)])
def test_quantile_is_the_nearest_rank(part: float, value: int) -> None:
    assert quantile(range(100, 0, -1), part) == value


def test_a_quantile_of_nothing_is_an_error() -> None:
    with pytest.raises(WrongResultError):
        quantile([], 0.5)


def test_sides_take_turns_and_another_one_is_first_each_round(tmp_path: Path) -> None:
    measured: list[str] = []
    sides = {name: counting(measured, name) for name in ("bare", "ours")}
    figures = in_turn(Plan(tmp_path, runs=3), sides)
    assert measured == ["bare", "ours", "ours", "bare", "bare", "ours"]
    assert figures == {"bare": [1, 4, 5], "ours": [2, 3, 6]}


@pytest.mark.parametrize(
    ("spark", "rows"),
    [
        ([12.0, 13.0, 25.0], None),  # behind at each size
        ([12.0, 13.0, 15.0], 580.0),  # 10 s behind at 100 rows, 5 s ahead at 820
        ([12.0, 3.0, 1.0], 100.0),
        ([1.0, 2.0, 3.0], 10.0),
    ],
)
def test_break_even_lies_between_the_sizes_where_spark_overtakes(spark: list[float], rows: float | None) -> None:
    assert break_even([10, 100, 820], spark, [1.0, 3.0, 20.0]) == rows


# --- checks -----------------------------------------------------------------------------------------------


def test_a_check_fails_loudly() -> None:
    check(True, "not shown")
    with pytest.raises(WrongResultError, match="rows differ"):
        check(False, "rows differ")


@pytest.mark.parametrize(
    ("delivered", "problem"),
    [
        ([0, 2], "1 were not delivered, 0 more than once, 0 unknown"),
        ([0, 1, 1, 2], "0 were not delivered, 1 more than once, 0 unknown"),
        ([0, 1, 2, 3], "0 were not delivered, 0 more than once, 1 unknown"),
    ],
)
def test_each_message_is_to_be_delivered_once(delivered: list[int], problem: str) -> None:
    check_once_each([2, 0, 1], 3)
    with pytest.raises(WrongResultError, match=problem):
        check_once_each(delivered, 3)


@pytest.mark.parametrize("number", [0, 9, 10, 99_999, 100_000])
def test_payloads_have_the_agreed_size(number: int) -> None:
    assert len(JSON.encode(order(number))) == PAYLOAD_BYTES
    assert len(raw_payload(number)) == PAYLOAD_BYTES
    assert number_of(raw_payload(number)) == number


# --- reports ----------------------------------------------------------------------------------------------


BEGIN, END = "<!-- BF: begin -->", "<!-- BF: end -->"


def test_a_line_says_whether_the_goal_is_met() -> None:
    assert as_line(row(0.7, 0.6, 0.8)) == (
        "BF0  nothing at all: 0.7 [0.6-0.8] x bare (goal ≥ 0.5) met; 2 µs, bare 1 µs"
    )
    assert "NOT MET" in as_line(row(0.4))
    assert as_line(row(0.4, goal=None)).startswith("BF0  nothing at all: 0.4 [0.4-0.4] x bare shown;")


def test_the_table_shows_goal_median_spread_and_verdict() -> None:
    text = as_markdown([row(0.7, 0.6, 0.8), row(0.4), row(0.4, goal=None)], {"Python": "3.14.0", "SQLite": "3.50.0"})
    assert text.splitlines() == [
        "| id | measured | median [min-max] | unit | goal | met | medians of both sides, or a note |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| BF0 | nothing at all | 0.70 [0.60-0.80] | x bare | ≥ 0.5 | yes | 2 µs, bare 1 µs |",
        "| BF0 | nothing at all | 0.40 [0.40-0.40] | x bare | ≥ 0.5 | **no** | 2 µs, bare 1 µs |",
        "| BF0 | nothing at all | 0.40 [0.40-0.40] | x bare |  |  | 2 µs, bare 1 µs |",
        "",
        "Conditions: Python 3.14.0, SQLite 3.50.0.",
    ]


def test_json_holds_every_rounds_value() -> None:
    before = b'{"BP": "kept", "BF": "replaced"}'
    reports = json.loads(as_json(before, [row(0.7, 0.6, 0.8)], {"Python": "3.14.0"}))
    assert set(reports) == {"BP", "BF"}
    assert reports["BP"] == "kept"
    report = reports["BF"]
    assert report["surroundings"] == {"Python": "3.14.0"}
    assert report["results"] == [
        {
            "id": "BF0",
            "what": "nothing at all",
            "unit": "x bare",
            "median": 0.7,
            "spread": [0.6, 0.8],
            "values": [0.7, 0.6, 0.8],
            "goal": "≥ 0.5",
            "met": True,
            "beside": "2 µs, bare 1 µs",
        }
    ]


def test_surroundings_name_versions_and_machine(tmp_path: Path) -> None:
    around = surroundings(Plan(tmp_path, runs=7))
    assert {"date", "aiodelay", "Python", "SQLite", "msgspec", "machine"} <= set(around)
    assert "cores" in around["machine"]
    assert around["rounds"] == "7"


def test_the_table_replaces_what_stands_between_the_markers() -> None:
    document = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert put_between_markers(document, "BF", "new") == f"before\n{BEGIN}\nnew\n{END}\nafter\n"


@pytest.mark.parametrize("document", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}", f"{BEGIN}{END}{END}"])
def test_a_document_without_its_markers_is_left_alone(document: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        put_between_markers(document, "BF", "new")


def test_performance_page_has_the_markers() -> None:
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    for family in {benchmark.id[:2] for benchmark in BENCHMARKS}:
        assert put_between_markers(page.read_text(encoding="utf-8"), family, "new")


# --- all of it --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with running_server(None) as url:
        yield url


ELSEWHERE = [each for each in BENCHMARKS if each.needs_kafka or each.needs_spark]
"""Those that tests/integration and tests/spark run."""


@pytest.fixture(params=[each for each in BENCHMARKS if each not in ELSEWHERE], ids=lambda benchmark: benchmark.id)
def small_benchmark(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> tuple[Benchmark, Plan]:
    return request.param, Plan(tmp_path, runs=1, scale=0.002, redis=redis_url)


@pytest.mark.nightly  # it proves the measuring, not aiodelay
def test_each_benchmark_works_and_finds_its_results_right(small_benchmark: tuple[Benchmark, Plan]) -> None:
    benchmark, plan = small_benchmark
    rows = benchmark.run(plan)
    assert {each.id for each in rows} == {benchmark.id}
    assert any(each.goal is not None for each in rows)
    assert all(len(each.values) == plan.runs for each in rows)


def test_the_command_writes_both_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, data = tmp_path / "page.md", tmp_path / "data.json"
    page.write_text(f"{BEGIN}\n{END}\n", encoding="utf-8")
    arguments = ["BF1", "--runs", "1", "--scale", "0.001", "--directory", f"{tmp_path}"]
    assert main([*arguments, "--markdown", f"{page}", "--json", f"{data}"]) == 0
    assert "BF1" in capsys.readouterr().out
    assert "| BF1 |" in page.read_text(encoding="utf-8")
    assert json.loads(data.read_bytes())["BF"]["results"]
    assert {path.name for path in tmp_path.iterdir()} == {"page.md", "data.json"}


def test_the_report_names_the_servers_build(redis_url: str, tmp_path: Path) -> None:
    around = surroundings(Plan(tmp_path, redis=redis_url))
    assert re.fullmatch(r"(Redis|Valkey) \d+\.\d+\.\d+ \(\S+, appendonly on\)", around["server"])


def test_a_server_that_holds_something_is_left_alone(redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        client.set("theirs", "x")
        try:
            with pytest.raises(WrongResultError, match="must be empty"), running_server(redis_url):
                pass
            assert client.get("theirs") == b"x"
        finally:
            client.delete("theirs")


def test_the_command_names_the_benchmarks_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["BF0"]) == 2
    assert "BF1, BF2" in capsys.readouterr().err
