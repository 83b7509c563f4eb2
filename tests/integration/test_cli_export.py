"""`aiodelay export` and `import`: from any store to any store, complete, and once despite repetitions."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest

from aiodelay import Every, Retry, Scheduler, StoreUnavailableError
from tests.support.cli import Cli
from tests.support.kafka import create_topic, new_name
from tests.support.servers import Found, redis_servers
from tests.support.waiting import until

SAFE: dict[str, str | float] = {
    "cleanup_policy": "compact",
    "min_compaction_lag_ms": 86_400_000,
    "delete_retention_ms": 604_800_000,
}


@pytest.fixture(scope="module")
def redis(shared_redis: Callable[[Found], str]) -> str:
    return shared_redis(redis_servers()[0])


class Stores:
    """Makes stores, each a new one."""

    def __init__(self, redis: str, folder: Path) -> None:
        self._redis, self._folder = redis, folder

    def new(self, kind: str) -> Cli:
        name = uuid4().hex[:8]
        cli = Cli(self._redis if kind == "redis" else f"sqlite:///{self._folder}/{name}.db", self._folder)
        cli.namespace = f"move-{name}"
        return cli


@pytest.fixture
def stores(redis: str, tmp_path: Path) -> Stores:
    return Stores(redis, tmp_path)


def fill(cli: Cli) -> None:
    """Store one message of each kind: text and bytes, recurring, late, versioned, retried, dead, held."""
    lines: list[dict[str, Any]] = [
        {"to": "handler:mail", "payload": "größe", "delay": "2h", "id": "text", "key": "k", "headers": {"a": "b"}},
        {"to": "handler:mail", "payload_base64": "/wA=", "delay": "2h", "id": "bytes", "key_base64": "/w=="},
        {"to": "handler:mail", "payload": "", "every": {"cron": "0 9 * * mon", "tz": "Europe/Paris"}, "id": "cron"},
        {"to": "handler:mail", "payload": "x", "delay": "2h", "id": "late", "late": {"drop": "15m"}},
        {"to": "handler:mail", "payload": "x", "delay": "2h", "id": "version", "conflict": {"newer": 7}},
        {"to": "handler:work", "payload": "retry", "delay": "0s", "id": "retry"},
        {"to": "handler:work", "payload": "dead", "delay": "0s", "id": "dead"},
    ]
    ran = cli("schedule", "--lines", stdin="\n".join(map(json.dumps, lines)).encode())
    assert ran.code == 0, ran

    async def play() -> None:
        plan = Retry.intervals(["1h"], by_type={EOFError: Retry.never()})
        scheduler = Scheduler(cli.url, namespace=cli.namespace, retry=plan, drain="1s")
        seen = set()

        async def work(event: bytes) -> None:
            seen.add(event)
            if event == b"dead":
                raise EOFError("no such order")
            raise ValueError("no answer")

        scheduler.add_handler(work, name="work")

        async def is_done() -> bool:
            retry = await scheduler.get("retry")
            letters = [each async for each in scheduler.dead_letters()]
            return len(seen) >= 2 and bool(letters) and retry is not None and retry.record.attempt > 0

        async with scheduler:
            await until(is_done, "a dead letter and a retry")

    asyncio.run(play())
    assert cli("pause", "sms").code == 0


def contents(cli: Cli) -> list[dict[str, Any]]:
    ran = cli("export", "--own") if cli.url.startswith("kafka") else cli("export")
    assert ran.code == 0, ran
    lines = [line for line in ran.objects if line["kind"] not in ("export", "end")]
    return sorted(({**line, "given_up": None} for line in lines), key=lambda line: (line["kind"], line.get("id", "")))


@pytest.mark.parametrize(("one", "other"), [("sqlite", "redis"), ("redis", "sqlite"), ("redis", "redis")])
def test_everything_arrives_as_it_was(stores: Stores, tmp_path: Path, one: str, other: str) -> None:
    old, new = stores.new(one), stores.new(other)
    fill(old)
    path = str(tmp_path / "messages.jsonl")
    ran = old("export", "--output", path, "--json")
    assert (ran.code, json.loads(ran.err)) == (0, {"hold": 1, "message": 6, "dead_letter": 1})
    ran = new("import", path, "--json")
    assert (ran.code, ran.object) == (0, {"stored": 8, "known": 0, "skipped": 0, "refused": 0, "is_whole": True})
    assert contents(new) == contents(old)
    (letter,) = [line for line in contents(new) if line["kind"] == "dead_letter"]
    assert letter["traceback"].splitlines()[-1] == letter["last_error"] == "EOFError: no such order"
    retry = new("get", "retry", "--json").object
    assert (retry["attempt"], retry["last_error"]) == (1, "ValueError: no answer")
    assert new("import", path, "--json").object["skipped"] == 8
    assert contents(new) == contents(old)


def test_repeated_it_brings_back_nothing_that_has_ended_since(stores: Stores) -> None:
    old, new = stores.new("sqlite"), stores.new("redis")
    fill(old)
    written = old("export").out.encode()
    assert new("import", stdin=written).code == 0
    assert new("cancel", "text", "--yes").code == 0
    assert new("resume", "sms").code == 0
    assert new("import", stdin=written).code == 0
    assert new("get", "text").code == 3
    assert new("pause").out == "none\n"
    assert new("import", "--again", "--json", stdin=written).object == {
        "stored": 2, "known": 6, "skipped": 0, "refused": 0, "is_whole": True,
    }  # fmt: skip
    assert new("get", "text").code == 0


def test_what_is_stored_under_the_same_id_stays(stores: Stores) -> None:
    old, new = stores.new("sqlite"), stores.new("redis")
    fill(old)
    new("schedule", "handler:mail", "newer", "--delay", "9h", "--id", "text")
    ran = new("import", "--json", stdin=old("export").out.encode())
    assert (ran.object["stored"], ran.object["known"]) == (7, 1)
    assert new("get", "text", "--json").object["payload"] == "newer"


def test_an_import_that_was_cut_off_goes_on(stores: Stores) -> None:
    old, new = stores.new("sqlite"), stores.new("sqlite")
    lines = [f'{{"to": "handler:m", "payload": "{i}", "delay": "1h", "id": "m{i}"}}' for i in range(1300)]
    assert old("schedule", "--lines", stdin="\n".join(lines).encode()).code == 0
    written = old("export").out.encode().splitlines(keepends=True)
    ran = new("import", stdin=b"".join(written[:1001]))
    assert (ran.code, ran.out) == (1, "1000 stored, 0 known, 0 skipped, 0 refused\n")
    assert ran.err == "the file has no end line: the export that wrote it was interrupted\n"
    assert new("cancel", "m0", "--yes").code == 0
    ran = new("import", "--json", stdin=b"".join(written))
    assert (ran.code, ran.object["stored"], ran.object["skipped"]) == (0, 300, 1000)
    assert new("get", "m0").code == 3


def test_the_rest_of_a_line_that_was_cut_off_is_read_by_the_next_import(stores: Stores) -> None:
    old, new = stores.new("sqlite"), stores.new("redis")
    fill(old)
    written = old("export").out.encode()
    cut = written[: written.index(b'"id":"late"')]
    assert new("import", stdin=cut).code == 1
    stored = cut.count(b"\n") - 1
    ran = new("import", "--json", stdin=written)
    assert (ran.code, ran.object["stored"], ran.object["skipped"]) == (0, 8 - stored, stored)
    assert contents(new) == contents(old)


def test_lines_that_cannot_be_read_are_named_and_the_rest_is_stored(stores: Stores) -> None:
    old, new = stores.new("sqlite"), stores.new("redis")
    fill(old)
    head, hold, first, *rest = old("export").out.encode().splitlines()
    bad = [
        b"{",
        b'{"kind": "thing"}',
        b'{"kind": "hold", "lane": 7}',
        first.replace(b'"due":"2', b'"due":"x'),
        first.replace(b'"kind":"message"', b'"kind":"dead_letter"'),
        first.replace(b'"revision":1', b'"revision":-1'),
        first.replace(b'"encoding":""', b'"encoding":"xml"'),
        first.replace(b'"to":"', b'"to":":'),
        first.replace(b'"late":"deliver"', b'"late":"5m"'),
        first.replace(b'"trace":{', b'"trace":[7],"x":{'),
        first.replace(b'"retrying":[]', b'"retrying":7'),
        first.replace(b'"earlier_errors":[]', b'"earlier_errors":7'),
        first.replace(b'"revision":1', b'"revision":9999999999'),
        first.replace(b'"lapses":0', b'"lapses":256'),
        first.replace(b'"due":"2', b'"due":"1'),
    ]
    ran = new("import", "--json", stdin=b"\n".join([head, *bad, hold, first, *rest]))
    assert (ran.code, ran.object["stored"], ran.object["refused"]) == (1, 8, len(bad))
    told = [json.loads(line) for line in ran.err.splitlines()]
    assert [each["line"] for each in told] == list(range(2, 2 + len(bad)))
    assert [each["field"] for each in told] == [
        "line", "kind", "lane, address", "due", "reason", "revision", "encoding", "to",
        "late", "trace", "retrying", "earlier_errors", "revision", "lapses", "due",
    ]  # fmt: skip
    assert contents(new) == contents(old)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"", "line"),
        (b"{}", "kind in line 1"),
        (b'{"kind": "export"}', "export in line 1"),
        (b'{"kind": "export", "export": "x", "format": 9}', "format"),
    ],
)
def test_what_is_no_export_is_refused(stores: Stores, text: bytes, field: str) -> None:
    ran = stores.new("sqlite")("import", "--json", stdin=text)
    assert (ran.code, ran.error["error"], ran.error["field"]) == (2, "InputError", field)


def test_what_was_cancelled_in_flight_does_not_travel(stores: Stores) -> None:
    cli = stores.new("redis")
    cli("schedule", "handler:mail", "x", "--delay", "0s", "--id", "a")
    kinds: list[str] = []

    async def play() -> None:
        scheduler = Scheduler(cli.url, namespace=cli.namespace)

        async def work(event: bytes) -> None:
            kinds.append((await asyncio.to_thread(cli, "export")).err)
            assert (await asyncio.to_thread(cli, "cancel", "a", "--yes")).out == "in_flight a\n"
            kinds.append((await asyncio.to_thread(cli, "export")).err)

        scheduler.add_handler(work, name="mail")
        async with scheduler, asyncio.timeout(60):
            await scheduler.run_until_idle()

    asyncio.run(play())
    before, after = kinds
    assert before.splitlines() == [
        "0 holds, 1 messages, 0 dead letters",
        "1 messages were in flight: this store may deliver them as well",
    ]
    assert after == "0 holds, 0 messages, 0 dead letters\n"


def test_files_that_are_not_there(stores: Stores) -> None:
    cli = stores.new("sqlite")
    assert cli("import", "no-such-file").err == "aiodelay: no-such-file: No such file or directory\n"
    assert cli("schedule", "--lines").code == 0
    assert cli("export", "--output", "/no/such/folder/x").code == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, StoreUnavailableError("the store", "gone")], ids=repr)
def test_an_interrupted_export_leaves_no_file(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | type[BaseException]
) -> None:
    cli, path = stores.new("sqlite"), tmp_path / "messages.jsonl"
    fill(cli)
    with monkeypatch.context() as patch:
        patch.setattr("aiodelay.cli.export.dead_letter_shape", Mock(side_effect=error))
        for text in (None, "the last one"):
            if text is not None:
                path.write_text(text)
            assert cli("export", "--output", str(path)).code == (130 if error is KeyboardInterrupt else 5)
            assert (path.read_text() if path.exists() else None) == text
    assert cli("export", "--output", str(path)).code == 0
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "end"
    assert [each.name for each in tmp_path.glob("messages*")] == ["messages.jsonl"]


@pytest.mark.parametrize("arguments", [["export"], ["list"], ["export", "--output", "/dev/full"]], ids=" ".join)
def test_output_that_cannot_be_written_is_told_in_a_line(stores: Stores, arguments: list[str]) -> None:
    cli = stores.new("sqlite")
    fill(cli)
    command = [sys.executable, "-m", "aiodelay", *arguments, "--store", cli.url, "--namespace", cli.namespace]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60)
    where = "--output /dev/full" if "--output" in arguments else "stdout"
    assert (ran.returncode, ran.stderr) == (1, f"aiodelay: {where}: No space left on device\n")


def test_a_series_goes_on_where_it_was(stores: Stores) -> None:
    """An occurrence that is being retried is a message of its own, which its series knows of."""
    old, new = stores.new("sqlite"), stores.new("redis")

    def scheduler_of(cli: Cli) -> Scheduler:
        return Scheduler(cli.url, namespace=cli.namespace, retry=Retry.intervals(["1h"]), drain="1s")

    async def play() -> None:
        scheduler = scheduler_of(old)

        async def work(event: bytes) -> None:
            raise ValueError("no answer")

        scheduler.add_handler(work, name="work")

        async def are_both_pending() -> bool:
            return len([each async for each in scheduler.pending()]) >= 2

        async with scheduler:
            await scheduler.schedule(b"x", to="handler:work", every=Every("1d"), id="series")
            await scheduler.fire("series")
            await until(are_both_pending, "the next of the series is pending")

    asyncio.run(play())
    assert new("import", stdin=old("export").out.encode()).code == 0
    assert contents(new) == contents(old)
    assert len(contents(new)) == 2
    assert new("cancel", "series", "--yes").out == "cancelled series\n"
    assert contents(new) == [], "the occurrence's retry ends with its series"


def test_into_kafka_and_back(stores: Stores, kafka: str, tmp_path: Path) -> None:
    old, back = stores.new("sqlite"), stores.new("redis")
    fill(old)
    topic = asyncio.run(create_topic(kafka, new_name("import"), 1, **SAFE))
    cli = Cli(f"kafka://{kafka}/{topic}", tmp_path)
    written = old("export").out.encode()
    ran = cli("import", "--own", "--json", stdin=written)
    assert (ran.code, ran.object["stored"]) == (0, 8), ran
    assert cli("import", "--own", "--json", stdin=written).object["skipped"] == 8
    assert contents(cli) == contents(old)
    assert back("import", stdin=cli("export", "--own").out.encode()).code == 0
    assert contents(back) == contents(old)
