"""`aiodelay load` and `top`, on real stores and on a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.cli import Cli
from tests.support.servers import Found, redis_servers
from tests.support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def redis(shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(redis_servers()[0])


@pytest.fixture(params=["sqlite", "redis"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    url = request.getfixturevalue("redis") if request.param == "redis" else f"sqlite:///{tmp_path}/delay.db"
    cli = Cli(url, tmp_path)
    cli.namespace = f"look-{uuid4().hex[:8]}"
    return cli


def add(cli: Cli, *delays: str, to: str = "handler:mail") -> None:
    for delay in delays:
        assert cli("schedule", to, "x", "--delay", delay).code == 0


def test_load_is_drawn_and_counted(cli: Cli) -> None:
    add(cli, "90m", "95m", "100m", "100m", "210m", "9h")
    add(cli, "90m", to="handler:sms")
    shapes = cli("load", "--bucket", "1h", "--buckets", "4", "--json").objects
    *shapes, mail, sms = shapes
    assert [each["forecast"]["lane"] for each in (mail, sms)] == ["mail", "sms"]
    assert [(each["lane"], each["messages"]) for each in shapes] == [("mail", 4), ("sms", 1), ("mail", 1)]
    lines = cli("load", "--bucket", "1h", "--buckets", "4").lines
    assert [line.split()[2] for line in lines[:4]] == ["0", "5", "0", "1"]
    bars = [line.count("█") for line in lines[:4]]
    assert bars[0] == bars[2] == 0
    assert bars[1] == max(bars)
    assert 0 < bars[3] <= bars[1] // 5
    assert lines[4].startswith("6 messages; most, 5, from ")
    assert lines[1].startswith(lines[4].partition(", from ")[2])
    assert cli("load", "--of", "sms", "--buckets", "4").lines[4].startswith("1 messages; most, 1")
    assert cli("load", "--of", "nothing", "--buckets", "1").lines[-1] == "0 messages"


def test_load_of_a_span_beyond_the_calendar_ends_with_it(cli: Cli) -> None:
    add(cli, "1h")
    lines = cli("load", "--bucket", "3650d", "--buckets", "1000").lines
    assert lines[999].split() == ["9999-12-31", "23:59:59.999Z", "0"]


def test_load_refuses_what_is_no_span(cli: Cli) -> None:
    assert cli("load", "--bucket", "0s", "--json").error["error"] == "ConfigurationError"
    assert cli("load", "--buckets", "0").code == 2


def test_top_finds_an_overdue_message_behind_many_paused_ones(cli: Cli) -> None:
    cli("pause", "sms")
    line = b'{"to": "handler:sms", "payload": "x", "delay": "0s"}\n'
    assert cli("schedule", "--lines", stdin=250 * line).code == 0
    add(cli, "0s")
    assert cli("top").lines[1].startswith("oldest overdue for ")


def test_top_off_a_terminal_is_a_table(cli: Cli) -> None:
    add(cli, "0s", "2h")
    add(cli, "2h", to="handler:sms")
    cli("pause", "sms")
    lines = cli("top").lines
    assert "no journal" in lines[1]
    assert lines[1].startswith("oldest overdue for ")
    assert lines[2].split() == ["lane", "scheduled", "overdue", "in", "flight", "held", "dead"]
    assert lines[3].split() == ["mail", "1", "1", "0", "0", "0", "read", "by", "nobody"]
    assert lines[4].split() == ["sms", "0", "0", "0", "1", "0", "paused;", "read", "by", "nobody"]
    shapes = cli("top", "--json", "--times", "2", "--every", "100ms").objects
    assert len(shapes) == 2
    assert shapes[0]["paused"] == ["sms"]
    assert [each["lane"] for each in shapes[0]["lanes"]] == ["mail", "sms"]
    assert shapes[0]["oldest_overdue"].endswith("Z")
    assert shapes[0]["lateness"] is None


def test_bench_measures_both_stores_and_leaves_no_message(cli: Cli) -> None:
    shape = cli("bench", "--messages", "300", "--json").object
    for figures in (shape["store"], shape["memory"]):
        assert all(figures[name] > 0 for name in figures if not name.startswith("lateness"))
        assert figures["schedule_p50_ms"] <= figures["schedule_p99_ms"]
    for name in ("schedule_many_per_s", "deliver_per_s"):
        assert shape["ratio"][name] == pytest.approx(shape["store"][name] / shape["memory"][name], abs=0.001)
    assert cli("list", "--namespace", "aiodelay-bench", "--json").objects == []
    assert len(cli("bench", "--messages", "100").lines) == 7
    assert cli("bench", "--store", "kafka://localhost/x").code == 1


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals are POSIX")
def test_top_on_a_terminal_is_live_until_a_signal(tmp_path: Path) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/delay.db?journal=100", tmp_path)
    add(cli, "2h")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "AIODELAY_STORE": cli.url, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "aiodelay", "top", "--every", "100ms"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        seen = _read_until(ours, b"mail")
        assert b"no first attempt in the last 5m" in seen
        add(cli, "2h", to="handler:sms")
        assert b"sms" in _read_until(ours, b"sms")
        process.send_signal(signal.SIGINT)
        _read_until(ours, b"\x1b[?1049l")  # the screen as it was before
        assert process.wait(PATIENCE_S) == 0
    os.close(ours)


def _read_until(terminal: int, wanted: bytes) -> bytes:
    seen, ends = b"", time.monotonic() + PATIENCE_S
    while wanted not in seen:
        assert time.monotonic() < ends, seen
        if select.select([terminal], [], [], 0.1)[0]:
            seen += os.read(terminal, 65_536)
    return seen


LOOKING_AND_CHANGING = (
    ("get", "m"),
    ("list",),
    ("why", "m"),
    ("check",),
    ("load",),
    ("top",),
    ("export",),
    ("dead", "list"),
    ("pause",),
    ("pause", "mail"),
    ("resume", "mail"),
    ("cancel", "m", "--yes"),
    ("reschedule", "m", "--delay", "1h"),
    ("fire", "m"),
    ("dead", "redrive", "--all", "--yes"),
    ("dead", "purge", "--all", "--yes"),
)


@pytest.mark.parametrize("command", LOOKING_AND_CHANGING, ids=" ".join)
def test_a_mistyped_file_is_told_and_not_made(tmp_path: Path, command: tuple[str, ...]) -> None:
    cli = Cli(f"sqlite:///{tmp_path}/typo.db", tmp_path)
    ran = cli(*command)
    assert ran.code == 5
    assert f"no such file: {tmp_path}/typo.db" in ran.out + ran.err
    assert [path.name for path in tmp_path.iterdir()] == ["stdin"]


def test_what_stores_messages_makes_the_file(tmp_path: Path) -> None:
    exported = Cli(f"sqlite:///{tmp_path}/one.db", tmp_path)
    add(exported, "1h")
    lines = exported("export").out.encode()
    imported = Cli(f"sqlite:///{tmp_path}/two.db", tmp_path)
    assert imported("import", stdin=lines).code == 0
    assert (tmp_path / "one.db").exists()
    assert (tmp_path / "two.db").exists()
