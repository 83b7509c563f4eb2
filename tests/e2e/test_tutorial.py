"""docs/tutorial.md: its programs run in one folder, in order, and print the shown lines; two processes share Redis."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiodelay.testing.servers import redis_servers, serving
from tests.support.command import PYTEST, Program, aiodelay
from tests.support.service import Service, until_ready

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(
    r"^```python\n# (?P<name>\w+\.py)\n(?P<code>.*?)^```$"  # a program, the command that runs it, its output
    r"(?:(?:\n\n[^`\n]+)?\n\n```console\n[^`]*```)?(?:\n\n```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
BLOCKS = list(BLOCK.finditer(PAGE))
FAILS = re.compile(r"^CheckPayment: ")
"""The log's lines about attempts that the page makes fail."""


def save_all(folder: Path) -> None:
    for block in BLOCKS:
        (folder / block["name"]).write_text(block["code"])


def test_every_block_names_its_file() -> None:
    assert len(BLOCKS) == PAGE.count("```python\n")


@pytest.mark.timeout(900)  # two dozen processes, one after the other
def test_the_programs_run_in_order_also_a_second_time(tmp_path: Path) -> None:
    for block in BLOCKS:
        (tmp_path / block["name"]).write_text(block["code"])
        is_test = block["name"].startswith("test_")
        arguments = [*PYTEST, "-q", "-p", "no:randomly", block["name"]] if is_test else [block["name"]]
        for _ in range(2):  # the second time on the store of the first
            with Program(*arguments, cwd=tmp_path) as program:
                assert program.exit_code() == 0, [*program.out.seen, *program.err.seen]
                assert is_test or [line for line in program.complaints() if not FAILS.search(line)] == []
                if block["name"] == "place_orders.py":  # no worker has taken the orders of the first time
                    break
                if block["shown"] is not None:
                    assert program.out.seen == block["shown"].splitlines(), block["name"]


@pytest.fixture
def redis_url() -> Iterator[str]:
    with serving(redis_servers()[0]) as url:
        yield f"{url}?journal=10000"


def test_two_processes_share_the_messages_on_redis(tmp_path: Path, redis_url: str) -> None:
    save_all(tmp_path)
    shop = {"SHOP_STORE": redis_url}
    with aiodelay("run", "shop:scheduler", cwd=tmp_path, environment=shop) as worker:
        worker.err.wait_for("shop:scheduler is dispatching")
        worker.send(signal.SIGSTOP)  # else it takes order 103 if `place_orders.py` stands still before it cancels it
        with Program("place_orders.py", cwd=tmp_path, environment=shop) as orders:
            assert orders.exit_code() == 0, orders.err.seen
            shown = next(block["shown"] for block in BLOCKS if block["name"] == "place_orders.py")
            assert orders.out.seen == shown.splitlines()
        worker.send(signal.SIGCONT)
        checked = sorted(worker.out.wait_for("is order") for _ in range(2))
        assert checked == [f"is order {order} paid? (attempt 2)" for order in (101, 102)]
        worker.send(signal.SIGTERM)
        assert worker.exit_code() == 0
    with aiodelay("why", "order-101", "--store", redis_url, cwd=tmp_path) as why:
        assert why.exit_code() == 0, why.err.seen
        assert why.out.seen[0].startswith("delivered")
    with Service(tmp_path, None, {"AIODELAY_STORE": redis_url}) as service, service.client() as client:
        until_ready(client)
        assert "order-101" in client.get("/messages/order-101").text
