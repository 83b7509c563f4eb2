"""The rules of the benchmarks beside peers, and that they work. Speed is not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import WrongResultError
from benchmarks.peers import failures
from benchmarks.peers.__main__ import MARKERS, main
from benchmarks.peers.environments import CACHE, Environment, MissingPeerError, environment, is_installed
from benchmarks.peers.measures import Delivery, Drain, Late, Measured, delivery_of
from benchmarks.peers.processes import Run, Worker, wait_until
from benchmarks.peers.sides import AIODELAY, BASE, PEERS, Side, requirements
from benchmarks.peers.tables import as_markdown
from benchmarks.report import put_between_markers

ARQ = Side(next(peer for peer in PEERS if peer.name == "arq"), "default")
NO_FAULT = Delivery(0, 0, 0)


def drained(*message_us: float) -> Measured:
    return Measured(drains={number: Drain(each, each, each, NO_FAULT) for number, each in enumerate(message_us)})


# --- the deliveries ---------------------------------------------------------------------------------------


def test_faults_of_a_peer_are_counted() -> None:
    began = [Run(0, 5_000_000), Run(0, 6_000_000), Run(1, 4_999_999)]
    assert delivery_of(ARQ, began, {0: 5, 1: 5, 2: 5}) == Delivery(lost=1, doubled=1, early=1)
    assert f"{Delivery(1, 2, 3)}" == "1 not delivered, 2 delivered twice or more, 3 early"


@pytest.mark.parametrize("began", [[], [Run(0, 5_000_000)] * 2, [Run(0, 4_999_999)]])
def test_a_fault_of_aiodelay_fails_the_benchmark(began: list[Run]) -> None:
    delivery_of(BASE, [Run(0, 5_000_000)], {0: 5})
    with pytest.raises(WrongResultError, match="aiodelay: 1"):
        delivery_of(BASE, began, {0: 5})


def test_a_message_that_nobody_scheduled_fails_the_benchmark() -> None:
    with pytest.raises(WrongResultError, match="unknown"):
        delivery_of(ARQ, [Run(7, 5_000_000)], {0: 5})


# --- the tables -------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_of_the_rounds_that_both_sides_measured() -> None:
    ours = Measured(drains={number: Drain(each, each, 1.0, NO_FAULT) for number, each in ((1, 40.0), (2, 90.0))})
    text = as_markdown({BASE: drained(100.0, 10.0, 30.0), ARQ: ours}, {}, {})
    assert "| arq | default | 0.292 [0.25-0.333] x (65 µs) | 3.5 [3-4] x (65 µs) |" in text


def test_a_failure_is_named_and_is_no_zero() -> None:
    text = as_markdown({BASE: drained(1.0), ARQ: Measured(failures=["its worker ended"])}, {}, {})
    assert "| arq | default | failed | failed | failed | failed | failed | failed |" in text
    assert "Failed: arq, default: its worker ended." in text


def test_early_messages_are_named() -> None:
    late = Measured(lateness={0: Late(1.0, 2.0, Delivery(0, 0, 4))})
    assert "4 early |" in as_markdown({BASE: late, ARQ: late}, {}, {})


def test_the_page_has_the_markers_and_names_the_peers_that_are_left_out() -> None:
    text = as_markdown({BASE: drained(1.0)}, {ARQ.peer: "pip failed"}, {"Python": "3.14.0"})
    assert text.endswith("Left out: arq, because pip failed.\n\nConditions: Python 3.14.0.")
    page = Path(__file__).parents[2] / "docs" / "performance.md"
    assert text in put_between_markers(page.read_text(encoding="utf-8"), MARKERS, text)


# --- kills ------------------------------------------------------------------------------------------------


def test_lost_doubled_and_late_messages_are_counted() -> None:
    messages = failures.Messages(range(3), 1_000, range(3, 5), 9_000)
    ended = [Run(0, 2_000_000_000), Run(-1, 2_500_000_000), Run(1, 3_000_000_000), Run(0, 7_000_000_000)]
    ended += [Run(3, 9_500_000_000)]
    outcome = failures.outcome_of(messages, 2, ended)
    assert outcome == failures.Outcome(2, lost=1, doubled=1, late_s=2.0, pending_lost=1, pending_late_s=0.5)
    nothing = failures.outcome_of(messages, 0, [])
    assert nothing == failures.Outcome(0, 3, 0, None, 2, None)


def test_the_page_of_failures_has_the_markers_and_no_zero_for_what_never_ran() -> None:
    outcomes = {BASE: failures.Outcome(16, 0, 0, 4.25, 0, 0.02), ARQ: failures.Outcome(2, 149, 0, None, 20, 328.3)}
    text = failures.as_markdown(outcomes | {ARQ._replace(settings="best"): "it ended"}, {}, {"Python": "3.14.0"}, 90.0)
    assert "| aiodelay | default | 16 | 0 | 0 | 4.2 s | 0 | 0.0 s |" in text
    assert "| arq | default | 2 | 0 | 149 | none ran | 20 | 328 s |" in text
    assert "| arq | best | failed: it ended |" in text
    assert text.endswith("Conditions: wait of 1.5 minutes, Python 3.14.0.")
    page = Path(__file__).parents[2] / "docs" / "failures.md"
    assert text in put_between_markers(page.read_text(encoding="utf-8"), failures.MARKERS, text)


# --- the environments and processes -----------------------------------------------------------------------


@pytest.mark.parametrize("peer", PEERS[1:], ids=lambda peer: peer.name)
def test_the_versions_of_a_peer_are_pinned(peer: object) -> None:
    assert isinstance(peer, type(AIODELAY))
    assert all("==" in each or (peer.is_node and "@" in each) for each in requirements(peer))


def test_an_environment_with_other_versions_does_not_count(tmp_path: Path) -> None:
    assert is_installed(AIODELAY, tmp_path)
    assert not is_installed(ARQ.peer, tmp_path)
    (tmp_path / "arq").mkdir()
    (tmp_path / "arq" / "installed.txt").write_text("arq==0.1")
    assert not is_installed(ARQ.peer, tmp_path)
    (tmp_path / "arq" / "installed.txt").write_text("\n".join(requirements(ARQ.peer)))
    assert is_installed(ARQ.peer, tmp_path)


def test_a_peer_on_node_is_left_out_without_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}")
    (on_node,) = (peer for peer in PEERS if peer.is_node)
    with pytest.raises(MissingPeerError, match="node and npm are not on PATH"):
        environment(on_node, tmp_path)


def test_a_kill_ends_all_processes_of_a_worker(tmp_path: Path) -> None:
    forks = Environment(("/bin/sh", "-c", f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait"), {})
    with Worker(forks, {}, tmp_path) as worker:
        assert wait_until(lambda: bool((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()), 60)
        assert not worker.has_ended()
        assert worker.memory_bytes() > 0
        worker.kill()
        assert worker.has_ended()
    child = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    assert not child.exists() or ") Z " in child.read_text()  # dead: its new parent may not have noticed yet


def test_the_command_names_the_peers_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quartz"]) == 2
    assert "aiodelay, arq" in capsys.readouterr().err
    assert failures.main(["quartz"]) == 2
    assert "aiodelay, arq" in capsys.readouterr().err


@pytest.mark.nightly  # it proves the measuring, not aiodelay
@pytest.mark.timeout(1800)
def test_the_command_measures_aiodelay_and_a_peer_that_is_installed(tmp_path: Path) -> None:
    """`python -m benchmarks.peers` installs peers; without it, aiodelay runs alone."""
    installed = [peer.name for peer in PEERS[1:] if is_installed(peer, CACHE)]
    page = tmp_path / "page.md"
    page.write_text("<!-- peers: begin -->\n<!-- peers: end -->\n", encoding="utf-8")
    arguments = [*(installed[:1] or ["aiodelay"]), "--runs", "1", "--scale", "0.005", "--directory", f"{tmp_path}"]
    assert main([*arguments, "--markdown", f"{page}"]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("| aiodelay | default |") == text.count("| aiodelay | best |") == 2
    assert all(text.count(f"| {name} | {each} |") == 2 for name in installed[:1] for each in ("default", "best"))


@pytest.mark.nightly  # it proves the measuring, not aiodelay
@pytest.mark.timeout(1800)
def test_the_command_kills_workers_of_aiodelay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- failures: begin -->\n<!-- failures: end -->\n", encoding="utf-8")
    assert failures.main(["aiodelay", "--scale", "0.04", "--directory", f"{tmp_path}", "--markdown", f"{page}"]) == 0
    assert page.read_text(encoding="utf-8").count("| aiodelay | ") == 2
