"""A short nemesis on each stack: a fixed schedule of faults. `nox -s nemesis` runs longer ones, with any seed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import cast
from xml.etree import ElementTree

import pytest

from aiodelay import Context, Retry, Scheduler
from aiodelay.testing import history as h
from aiodelay.testing.history import Story
from tests.faults.programs.kafka_user import FAR_MS
from tests.faults.programs.worker import Plan
from tests.nemesis.chart import as_svg, figures_in
from tests.nemesis.kafka import (
    AHEAD_S,
    LINGERS_S,
    MOST_AGAIN,
    SURE_S,
    KafkaClusterStage,
    KafkaStage,
    Known,
    Step,
    read_ends,
)
from tests.nemesis.redis import RedisStage, ValkeyStage
from tests.nemesis.results import as_markdown, put_between_markers
from tests.nemesis.schedule import Fault, Kind, draw, moments
from tests.nemesis.soak import LINGERS_S as SOAK_LINGERS_S
from tests.nemesis.soak import Mark, SoakStage, soak, unexplained
from tests.nemesis.sqlite import SqliteStage
from tests.nemesis.stage import PROCESS_KINDS, Result, Span, Stage, inject, play
from tests.support.kafka import Broker, new_name
from tests.support.waiting import until_sync

SECONDS, SEED = 20.0, 7
STAGES: list[type[Stage]] = [SqliteStage, RedisStage, KafkaStage]
AT_NIGHT: list[type[Stage]] = [ValkeyStage, KafkaClusterStage]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "stage",
    [*STAGES, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in AT_NIGHT)],
    ids=lambda stage: stage.name,
)
def test_the_promises_hold_under_a_random_schedule_of_faults(stage: type[Stage], tmp_path: Path) -> None:
    with stage(tmp_path, SEED, SECONDS) as playing:
        result = play(playing, SEED, SECONDS)
    print(result.summary)
    again = f"nox -s nemesis -- --stack {stage.name} --seed {SEED} --minutes {SECONDS / 60:.3f}"
    assert not result.violations, f"repeat: {again}; histories: {tmp_path}\n" + "\n".join(result.violations[:20])


class BrokenStage(SqliteStage):
    """A stage whose processes break a promise."""

    kinds = PROCESS_KINDS
    bug = ""

    def plan(self, name: str, **settings: object) -> Plan:
        return super().plan(name, bug=self.bug, **settings)


@pytest.mark.nightly
@pytest.mark.parametrize(("bug", "rule"), [("SettlesFirst", "S2"), ("DeliversEarly", "S1")])
def test_a_broken_promise_is_found(bug: str, rule: str, tmp_path: Path) -> None:
    """Negative control."""
    with BrokenStage(tmp_path, SEED, 8.0) as playing:
        playing.bug = bug
        result = play(playing, SEED, 8.0)
    assert rule in {violation.partition(":")[0] for violation in result.violations}


class CarelessStage(RedisStage):
    """A stage whose store acknowledges commands before the replica has them, and whose failovers say otherwise."""

    kinds = tuple(kind for kind in RedisStage.kinds if kind.name == "failover")

    def open(self, stack: ExitStack) -> None:
        super().open(stack)
        self.scene.url = self.scene.url.replace("replicated:1", "memory")


@pytest.mark.nightly
def test_commands_that_a_failover_loses_are_found(tmp_path: Path) -> None:
    """Negative control."""
    with CarelessStage(tmp_path, SEED, 10.0) as playing:
        result = play(playing, SEED, 10.0)
    assert "S2" in {violation.partition(":")[0] for violation in result.violations}


NOW_MS, NOW_NS = time.time_ns() // 1_000_000, time.monotonic_ns()


def known(
    *commands: tuple[str, h.Outcome, int],
    faults_s: Sequence[tuple[float, float]] = (),
    kind: str = "service killed",
    steps: Sequence[Step] = (),
    ended_ms: Mapping[str, int] | None = None,
) -> Known:
    """Return commands about the id `m`: the kind or the payload, the outcome, the due time in s from `NOW_MS`.

    The commands are given at `NOW_NS`, and the times of faults count from there.
    """
    events: list[h.Event] = []
    for call, (what, outcome, due_s) in enumerate(commands):
        if what == "cancel":
            events.append(h.Invoked(call=call, op="cancel", id="m"))
        else:
            digest = h.digest_of(what.encode())
            at_ms = NOW_MS + due_s * 1000
            events.append(h.Invoked(call=call, op="schedule", id="m", digest=digest, lane="kafka", at_ms=at_ms))
        events.append(h.Returned(call=call, outcome=outcome))
    for number, event in enumerate(events):
        event.at_ns = NOW_NS + number
    spans = [Span(NOW_NS + round(begin * 1e9), NOW_NS + round(end * 1e9), kind) for begin, end in faults_s]
    return Known(Story(events), spans, steps, ended_ms)


FIRST: tuple[str, h.Outcome, int] = ("m/0", "ok", 3000)
SECOND: tuple[str, h.Outcome, int] = ("m/1", "ok", 4000)


@pytest.mark.parametrize(
    ("rules", "commands", "delivered"),
    [
        ([], [FIRST], {"m/0": [3000]}),
        ([], [FIRST, SECOND], {"m/1": [4000]}),
        ([], [FIRST, ("m/1", "fail", 4000)], {"m/0": [3001]}),
        ([], [FIRST, ("m/1", "info", 4000)], {}),
        ([], [FIRST, ("cancel", "ok", 0)], {}),
        ([], [("m/0", "ok", 2), SECOND], {"m/0": [2], "m/1": [4000]}),
        (["S1"], [FIRST], {"m/0": [2999]}),
        (["S2"], [FIRST], {}),
        (["S2"], [FIRST, ("cancel", "fail", 0)], {}),
        (["S3"], [FIRST], {"m/0": [3000, 3001]}),
        (["S4, S5"], [FIRST, SECOND], {"m/0": [3000], "m/1": [4000]}),
        (["S4, S5"], [FIRST, ("cancel", "ok", 0)], {"m/0": [3000]}),
        (["S8"], [FIRST], {"m/0": [3000], "n/0": [3000]}),
        (["S8"], [FIRST, ("m/1", "fail", 4000)], {"m/0": [3000], "m/1": [4000]}),
    ],
)
def test_the_judge_of_kafka_finds(
    rules: list[str], commands: list[tuple[str, h.Outcome, int]], delivered: dict[str, list[int]]
) -> None:
    times = {h.digest_of(name.encode()): [NOW_MS + at * 1000 for at in all_at] for name, all_at in delivered.items()}
    _, broken = known(*commands).judge("kafka", times, is_exact=True)
    assert [text.partition(":")[0] for text in broken] == rules


@pytest.mark.parametrize(
    ("is_judged", "faults_s"),
    [
        (True, [(1_000, 2_000)]),
        (False, [(1_000, 4_000)]),
        (False, [(-4_000, -5)]),
        (True, [(-4_000, -15)]),
        (True, [(3_001, 6_000)]),
    ],
    ids=["a short fault", "a long fault", "a long fault that ended just before", "an earlier fault", "a later fault"],
)
def test_the_judge_of_kafka_judges_a_change_unless_a_fault_took_most_of_the_time_to_the_due_time(
    *, is_judged: bool, faults_s: list[tuple[float, float]]
) -> None:
    commands = known(FIRST, ("cancel", "ok", 0), faults_s=faults_s)
    counted, broken = commands.judge("kafka", {h.digest_of(b"m/0"): [NOW_MS + 3_000_000]}, is_exact=True)
    assert (counted["changed in time"], len(broken)) == (is_judged, is_judged)


@pytest.mark.parametrize("stage", [KafkaStage, KafkaClusterStage], ids=lambda stage: stage.name)
def test_a_message_of_kafka_is_due_long_enough_after_its_change_to_judge_the_change(stage: type[KafkaStage]) -> None:
    longest_s = max(kind.lasts_s[1] for kind in stage.kinds)
    slow_s = longest_s  # on a busy machine, a fault takes longer than in its schedule
    assert SURE_S + LINGERS_S + longest_s + slow_s + AHEAD_S < FAR_MS / 1000


def at_ms(seconds: float) -> int:
    return NOW_MS + round(seconds * 1_000)


RUNS = [f"r{number}" for number in range(MOST_AGAIN + 1)]


@pytest.mark.parametrize(
    ("kind", "faults_s", "repeated", "rules"),
    [
        ("service killed", [(3_001, 3_002)], MOST_AGAIN, []),
        ("service killed", [(3_001, 3_002)], MOST_AGAIN + 1, ["B1"]),
        ("service killed", [(3_001, 3_002), (3_004, 3_004.5)], MOST_AGAIN + 1, []),
        ("broker killed", [(3_001, 3_002)], MOST_AGAIN + 1, []),
        ("broker killed", [(2_930, 2_941)], 1, []),
        ("broker killed", [(2_930, 2_939)], 1, ["B1"]),
        ("broker killed", [(3_006, 3_010)], 1, ["B1"]),
        ("client killed", [(3_001, 3_002)], 1, ["B1"]),
        ("broker killed", [], 1, ["B1"]),
    ],
)
def test_the_judge_of_kafka_bounds_the_repeated_runs_of_each_fault(
    kind: str, faults_s: list[tuple[float, float]], repeated: int, rules: list[str]
) -> None:
    """All messages run in second 3,000. In second 3,005, as many as said run again."""
    commands: list[tuple[str, h.Outcome, int]] = [(name, "info", 3_000) for name in RUNS]
    runs = {h.digest_of(name.encode()): [at_ms(3_000)] for name in RUNS}
    for name in RUNS[:repeated]:
        runs[h.digest_of(name.encode())].append(at_ms(3_005))
    _, broken = known(*commands, faults_s=faults_s, kind=kind).judge("kafka", runs, is_exact=False)
    assert sorted({text.partition(":")[0] for text in broken}) == rules


@pytest.mark.parametrize(("ended_s", "rules"), [(3_005, []), (2_994, []), (2_984, ["S6"])])
def test_the_judge_of_kafka_finds_a_message_that_comes_back(ended_s: float, rules: list[str]) -> None:
    """The longest fault takes 5 s, and lingers for 10 s. So a run 11 s after the end is no violation yet."""
    digest = h.digest_of(b"m/0")
    ended_ms = {digest: at_ms(ended_s)}
    commands = known(("m/0", "ok", 2_980), faults_s=[(2_990, 2_995)], ended_ms=ended_ms)
    _, broken = commands.judge("kafka", {digest: [at_ms(2_983), at_ms(3_005)]}, is_exact=False)
    assert [text.partition(":")[0] for text in broken] == rules


@pytest.mark.asyncio
async def test_the_ends_of_messages_are_read_from_the_topic_of_schedules(kafka: str) -> None:
    topic, begun_ms = new_name("schedules"), time.time_ns() // 1_000_000
    scheduler = Scheduler(
        f"kafka://{kafka}/{topic}?create_topic=true&partitions=1", retry=Retry(attempts=2, first="1ms")
    )

    @scheduler.handler(name="work")
    async def work(payload: bytes, context: Context) -> None:
        assert context.attempt > 1, "the first attempt fails"

    async with scheduler:
        await scheduler.schedule(b"replaced", to="handler:work", delay="1h", id="m")
        await scheduler.schedule(b"delivered", to="handler:work", delay="1ms", id="m")
        await scheduler.run_until_idle()
        await scheduler.schedule(b"pending", to="handler:work", delay="1h", id="m")
        ended_ms = await read_ends(kafka, topic)
    assert ended_ms.keys() == {h.digest_of(b"replaced"), h.digest_of(b"delivered")}
    assert all(begun_ms <= each <= time.time_ns() // 1_000_000 for each in ended_ms.values())


@pytest.mark.parametrize(
    ("steps", "rules"),
    [
        ([Step(at_ms(2_900), 1, 4_000)], []),
        ([Step(at_ms(2_900), 1, 3_000)], ["S1"]),
        ([Step(at_ms(2_900), 1, 4_000), Step(at_ms(2_950), 1, 0)], ["S1"]),
        ([Step(at_ms(2_900), 1, 4_000), Step(at_ms(2_995), 1, 0)], []),
        ([Step(at_ms(2_900), 1, 4_000), Step(at_ms(2_950), 2, 0)], []),
        ([Step(at_ms(3_001), 1, 4_000)], ["S1"]),
    ],
    ids=["ahead", "not far enough ahead", "ahead before", "ahead until the claim", "another clock", "ahead later"],
)
def test_the_judge_of_kafka_allows_an_early_delivery_only_while_a_clock_is_ahead(
    steps: list[Step], rules: list[str]
) -> None:
    delivered = {h.digest_of(b"m/0"): [at_ms(2_996.5)]}
    _, broken = known(FIRST, steps=steps).judge("kafka", delivered, is_exact=True)
    assert [text.partition(":")[0] for text in broken] == rules


def test_steps_of_the_clock_excuse_the_time_that_their_spans_cover_together(tmp_path: Path) -> None:
    stage = SqliteStage(tmp_path, SEED, 100.0)
    stage.begun_s = 1_000.0
    stage._doubts_ns = [
        (round(begin * 1e9), round(end * 1e9)) for begin, end in [(998, 1_002), (1_010, 1_020), (1_015, 1_025)]
    ]
    assert stage._excused() == pytest.approx(0.17)


def test_a_run_without_clock_steps_draws_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Kind] = []

    def draw_none(seed: int, seconds: float, kinds: Sequence[Kind], targets: Mapping[str, int]) -> list[Fault]:
        drawn.extend(kinds)
        raise NotImplementedError

    monkeypatch.setattr("tests.nemesis.stage.draw", draw_none)
    for with_clock in (True, False):
        with pytest.raises(NotImplementedError):
            play(SqliteStage(tmp_path, SEED, 1.0), SEED, 1.0, with_clock=with_clock)
    assert [kind.name for kind in drawn].count("clock stepped") == 1


class SlowBroker:
    """A broker that works only once it is told to."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.works = Event()

    def kill(self) -> None:
        self.calls.append("kill")

    def launch(self) -> None:
        self.calls.append("launch")

    def wait_until_ready(self) -> None:
        self.works.wait()

    def freeze(self) -> None:
        self.calls.append("freeze")

    def thaw(self) -> None:
        self.calls.append("thaw")


def test_a_broker_that_starts_holds_up_no_fault_and_gets_none(tmp_path: Path) -> None:
    stage, broker = KafkaStage(tmp_path, SEED, 1.0), SlowBroker()
    stage.brokers = [cast("Broker", broker)]
    killed, stopped = (Fault(0.0, f"broker {what}", 0, 0.0, 0.0) for what in ("killed", "stopped"))
    assert inject(stage, [killed]) == {"broker killed": 1}
    assert not inject(stage, [stopped]).total()
    broker.works.set()
    until_sync(lambda: stage.is_ready_for(stopped), "the broker works", 60)
    assert inject(stage, [stopped]) == {"broker stopped": 1}
    assert broker.calls == ["kill", "launch", "freeze", "thaw"]


@pytest.mark.nightly
def test_a_short_soak_loses_nothing_and_leaks_nothing(tmp_path: Path) -> None:
    figures = tmp_path / "soak.csv"
    with SoakStage(tmp_path, SEED, SECONDS, rate=100, figures=figures) as stage:
        print(soak(stage, SEED, SECONDS))
    assert not stage.violations
    assert len(figures.read_text().splitlines()) > 3


@pytest.mark.parametrize(
    ("runs", "marks", "is_explained"),
    [
        ([1, 2, 3], [], True),
        ([1, 2, 1], [], False),
        ([1, 2, 1], [Mark(0, 2, 1)], True),
        ([1, 2, 1, 2], [Mark(0, 2, 1)], False),
        ([1, 2, 1, 2], [Mark(0, 2, 1), Mark(5, 3, 0)], True),
        ([1, 2, 1, 2], [Mark(0, 2, 2), Mark(SOAK_LINGERS_S + 1, 3, 0)], False),
        ([1, 1, 2], [Mark(0, 2, 9)], False),
    ],
    ids=["none", "no fault", "a fault", "too many", "a lasting fault", "long after a fault", "before a fault"],
)
def test_a_soak_bounds_the_repeated_runs_of_each_fault(
    runs: list[int], marks: list[Mark], *, is_explained: bool
) -> None:
    assert (not unexplained(runs, marks)) == is_explained


def test_the_chart_of_a_soak_shows_each_figure_on_its_axis(tmp_path: Path) -> None:
    figures = tmp_path / "soak.csv"
    figures.write_text(
        "seconds,median_ms,late_ms,kb,redis_kb\n0,0,10,40000,0\n30,5,100,40000,700\n60,10,1000,40000,0\n"
    )
    svg = ElementTree.fromstring(as_svg(figures_in(figures), "Soak"))
    lines = [line.attrib["points"] for line in svg.iter("{http://www.w3.org/2000/svg}polyline")]
    assert [line.split()[0].partition(",")[0] for line in lines] == ["70"] * 4
    late, median, memory, _ = ([float(point.partition(",")[2]) for point in line.split()] for line in lines)
    assert late[0] - late[1] == pytest.approx(late[1] - late[2], abs=1)  # 10, 100 and 1,000 are evenly apart
    assert median[2] == late[0]
    assert len({*memory}) == 1


# --- the schedule and the table ---------------------------------------------------------------------------

KINDS = (
    Kind("killed", "process", lasts_s=(0.1, 2.0)),
    Kind("stopped", "process", lasts_s=(0.5, 6.0)),
    Kind("stepped", "clock", value=(-5.0, 5.0)),
)


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_repeats_its_schedule_and_faults_of_one_target_do_not_overlap(seed: int) -> None:
    faults = draw(seed, 60.0, KINDS, {"process": 2, "clock": 1})
    assert faults == draw(seed, 60.0, KINDS, {"process": 2, "clock": 1})
    assert faults != draw(seed + 1, 60.0, KINDS, {"process": 2, "clock": 1})
    assert {fault.kind for fault in faults} == {"killed", "stopped", "stepped"}
    busy_s: dict[tuple[bool, int], float] = {}
    for fault in faults:
        target = (fault.kind == "stepped", fault.target)
        assert fault.at_s >= busy_s.get(target, 0.0)
        busy_s[target] = fault.at_s + fault.lasts_s
    times = [at_s for at_s, _, _ in moments(faults)]
    assert times == sorted(times)
    assert len(times) == 2 * len(faults)


def test_the_table_counts_the_violations_of_the_runs_with_a_fault() -> None:
    results = {
        "redis": [
            Result(Counter({"server killed": 2}), [], ""),
            Result(Counter({"server killed": 1, "failover": 1}), ["S2: m was lost"], ""),
        ]
    }
    table = as_markdown(results, "Runs:")
    assert "| redis | failover | 1 | 1 |\n| redis | server killed | 3 | 1 |\n| redis | all | 4 | 1 |" in table
    page = put_between_markers("before\n<!-- nemesis: begin -->\nold\n<!-- nemesis: end -->\nafter\n", table)
    assert page == f"before\n<!-- nemesis: begin -->\n\n{table}\n\n<!-- nemesis: end -->\nafter\n"
    with pytest.raises(ValueError, match="nemesis: begin"):
        put_between_markers("a page without markers", table)
