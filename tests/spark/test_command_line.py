"""`aiodelay spark` as users run it: separate processes, JSON on stdout, one line about an error on stderr."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pyspark
import pytest

from aiodelay.cli.app import app
from aiodelay.cli.spark import JOBS
from tests.spark.connect import Client
from tests.support.cli import Ran
from tests.support.command import absolute_path

pytestmark = pytest.mark.timeout(600)  # a process starts a JVM of its own, which takes a loaded machine long

ROOT = Path(__file__).parents[2]
QUIET = ("--conf", "spark.ui.enabled=false", "--conf", "spark.sql.shuffle.partitions=2", "--master", "local[2]")
COUNTS = dict.fromkeys(("accepted", "repeated", "superseded", "stored", "replaced", "known"), 0)
MAP = "id=order_id,due_at=remind_at,payload=struct(*)"


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("orders") / "orders"
    subprocess.run([sys.executable, ROOT / "examples" / "spark" / "orders.py", folder, "--rows", "300"], check=True)
    return folder


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("SPARK_REMOTE", "SPARK_HOME")}
    paths = {"PYTHONPATH": absolute_path(clean.get("PYTHONPATH", ""))}
    return subprocess.run(
        arguments, cwd=cwd, env=clean | paths | environment, capture_output=True, text=True, check=False, timeout=500
    )


def aiodelay(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "aiodelay", "spark", *arguments, *QUIET, cwd=cwd, **environment)


def submitted(*arguments: str, cwd: Path, url: str) -> subprocess.CompletedProcess[str]:
    (script,) = run(sys.executable, "-m", "pyspark_aiodelay", cwd=cwd).stdout.split()
    submit = [f"{Path(pyspark.__file__).parent / 'bin' / 'spark-submit'}", *QUIET, "--conf", "spark.log.level=ERROR"]
    python = {"PYSPARK_PYTHON": sys.executable, "AIODELAY_STORE": "env:WHERE"}
    return run(*submit, script, *arguments, cwd=cwd, WHERE=url, **python)


def summary_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def told_by(done: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of ours; Java and Spark greet before it, and there is no trace."""
    assert "Traceback" not in done.stderr
    assert "\tat " not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("aiodelay: "))
    assert done.stderr.endswith(f"{line}\n")
    return line


@pytest.mark.parametrize("is_submitted", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_backfill_and_its_repetition(
    orders: Path, tmp_path: Path, job: Callable[..., Ran], *, is_submitted: bool
) -> None:
    line = ("backfill", "--from", f"parquet:{orders}", "--to", "redis-list:orders", "--map", MAP)
    url = f"sqlite:///{tmp_path / 'delay.db'}"
    first = submitted(*line, cwd=tmp_path, url=url) if is_submitted else aiodelay(*line, "--store", url, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    found = summary_of(first)
    assert (found["job"], found["rows"], found["rejected"]) == ("backfill", 300, 0)
    assert found["counts"] == COUNTS | {"accepted": 300, "stored": 300}
    assert found["facts"] == {"dry_run": False, "reasons": {}, "tombstone_window": "1d"}

    (tmp_path / "url").write_text(f"{url}\n")
    again = job(*line, "--store", f"file:{tmp_path / 'url'}")
    assert again.code == 0, again.err
    assert again.object["counts"]["known"] == 300


def test_rejected_rows_fail_the_job_above_a_threshold_and_are_written_down(
    orders: Path, tmp_path: Path, job: Callable[..., Ran]
) -> None:
    mapping = "id=if(order_id < 'order-0000003', null, order_id),due_at=remind_at,payload=struct(*)"
    line = (
        "backfill",
        "--from",
        f"parquet:{orders}",
        "--to",
        "redis-list:orders",
        "--map",
        mapping,
        "--dry-run",
    )
    places = ("--store", f"sqlite:///{tmp_path / 'delay.db'}", "--rejects", f"{tmp_path / 'rejects'}")
    done = job(*line, *places)
    assert done.code == 1, done.err
    assert done.object["facts"]["reasons"] == {"id.missing": 3}
    assert not (tmp_path / "delay.db").exists()
    assert list((tmp_path / "rejects").glob("*.parquet"))


@pytest.mark.parametrize(
    "session",
    [pytest.param(QUIET, id="local", marks=pytest.mark.nightly), pytest.param((), id="connect")],
)
def test_a_store_that_does_not_answer_is_told_in_one_line_and_a_code(
    orders: Path, tmp_path: Path, connect: Client, session: tuple[str, ...]
) -> None:
    store = ("--store", "redis://:secret@127.0.0.1:1", "--timeout", "1s")
    remote = {} if session else {"SPARK_REMOTE": connect.url}
    line = ("backfill", "--from", f"parquet:{orders}", "--to", "redis-list:orders", "--map", MAP, *store, *session)
    done = run(sys.executable, "-m", "aiodelay", "spark", *line, cwd=tmp_path, **remote)
    assert "is unavailable: " in told_by(done)
    assert (done.returncode, done.stdout) == (5, "")
    assert "secret" not in done.stderr


@pytest.mark.usefixtures("java")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        pytest.param(
            *(["--map", "id=order"], "map is missing 'due_at'; allowed: due_at=COLUMN; columns: order_id, "),
            marks=pytest.mark.nightly,  # in process: test_backfill
        ),
        (["--map", MAP, "--conf", "ui=false"], "--conf is 'ui'; allowed: spark.NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_and_a_code(
    orders: Path, tmp_path: Path, arguments: list[str], line: str
) -> None:
    first = ("backfill", "--from", f"parquet:{orders}", "--to", "redis-list:orders", "--store", "sqlite:///delay.db")
    done = aiodelay(*first, *arguments, cwd=tmp_path)
    assert line in told_by(done)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_shift_may_begin_with_a_minus() -> None:
    _, bound, _ = app.parse_args(["spark", "replay", "--from", "parquet:x", "--store", "sqlite:///x", "--shift", "-2h"])
    assert bound.arguments["shift"] == "-2h"


@pytest.mark.parametrize("name", JOBS)
def test_only_the_options_that_must_be_given_are_needed(name: str) -> None:
    import pydantic  # noqa: F401, PLC0415 - cyclopts judges what it has read by this once it is imported

    given = ["--ids", "a"] if name == "cold cancel" else []
    for argument in reduce(getitem, name.split(), app["spark"]).assemble_argument_collection():
        if argument.required:
            given += [argument.name, "1"]
    _, bound, _ = app.parse_args(["spark", *name.split(), *given], exit_on_error=False)
    assert len(bound.arguments) == len(given) / 2


def test_without_pyspark_it_is_told_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
sys.argv = ["aiodelay", "spark", "backfill", *sys.argv[1:]]
from aiodelay.cli import main
main()
"""
    helped = run(sys.executable, "-c", code, "--help", cwd=tmp_path)
    assert helped.returncode == 0
    assert "--rejects" in helped.stdout
    done = run(sys.executable, "-c", code, "--from", "parquet:x", "--store", "sqlite:///x", cwd=tmp_path)
    assert done.returncode == 2
    assert told_by(done).endswith("allowed: pip install 'aiodelay[spark-local]'")


def test_without_arrow_a_cluster_with_its_own_pyspark_is_told_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['pyarrow'] = None; from aiodelay.spark.jobs import backfill"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("aiodelay.spark is missing pyarrow; allowed: pip install 'aiodelay[spark]'\n")


@pytest.mark.parametrize("name", JOBS)
def test_every_option_of_a_job_stands_on_its_page(name: str) -> None:
    page = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "spark").glob("*.md"))
    arguments = reduce(getitem, name.split(), app["spark"]).assemble_argument_collection()
    options = {option for argument in arguments for option in argument.names if option.startswith("--")}
    options -= {
        option for option in options if f"--no-{option[2:]}" in page
    }  # of one that is on, its opposite is shown
    assert {option for option in options if not re.search(rf"{option}\b", page)} == set()
    assert f"aiodelay spark {name}" in page
