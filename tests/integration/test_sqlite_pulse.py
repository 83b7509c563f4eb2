"""B1, B2, L1, L5 on SQLite: when a lock proves that a process has ended, and which claims return then."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import os
import shutil
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from aiodelay.backends.sqlite import pulse, writer
from aiodelay.backends.sqlite.work import SqliteWork
from aiodelay.backends.sqlite.writer import Writer
from aiodelay.core.ids import new_id, new_op
from aiodelay.core.pulse import ANSWER_MS, QUIET_MS
from aiodelay.core.transitions import token_counter, token_for
from aiodelay.core.values import After, Cancel, Claim, Demand, Done, Envelope, Put, Renewal, RenewOutcome, SettleOutcome
from aiodelay.errors import StoreUnavailableError
from aiodelay.sqlite import SqliteStore
from aiodelay.testing.clock import VirtualClock
from tests.support.waiting import until

pytestmark = pytest.mark.asyncio

LANE = "work"
LEASE_MS = 15_000
AT_ONCE = 60
PULSE_MS = 60_000


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each look at other workers, and each answer of the writer, more time than a slow machine needs."""
    monkeypatch.setattr(pulse, "PULSE_MS", PULSE_MS)
    monkeypatch.setattr(writer, "ANSWER_MS", PULSE_MS)


class Stage:
    """Two workers in one process, whose threads the test plays: `work` holds claims, and `other` looks at its lock."""

    def __init__(self, store: SqliteStore, work: SqliteWork, other: SqliteWork) -> None:
        self.store, self.work, self.other = store, work, other
        self.folder = Path(f"{store.path}-workers")

    def file(self, work: SqliteWork) -> Path:
        """Return the path of the file that a worker has locked."""
        [path] = self.folder.glob(f"*-{work.pulse.holder:012x}")
        return path

    async def put(self, n: int) -> None:
        await self.store.apply([Put(new_op(), Envelope(f"m{i}", LANE), After(0)) for i in range(n)])

    async def claim(self, n: int = 500) -> Sequence[Claim]:
        return (await self.work.claim({LANE: Demand(n)}, request=new_id(), lease_ms=LEASE_MS)).claims

    async def look(self) -> int:
        """Take a step of the other worker's pulse. Return the time until its next step."""
        return (await asyncio.to_thread(self.other.pulse.step, ())).wait_ms

    async def keep(self, *tokens: int) -> None:
        """Take a step of the first worker's pulse."""
        await asyncio.to_thread(self.work.pulse.step, tokens)

    def end(self) -> Path:
        """Free the lock of the first worker as the end of its process does. Return the path of its file."""
        path = self.file(self.work)
        lock = self.work.pulse._lock
        assert lock._descriptor is not None
        os.close(lock._descriptor)
        lock._descriptor, lock._has_left = None, True
        return path

    async def settle(self, claim: Claim) -> SettleOutcome:
        [outcome] = await self.work.settle([done(claim)])
        return outcome

    def holders(self) -> set[int | None]:
        """Return the holders of all leases."""
        with closing(sqlite3.connect(self.store.path)) as connection:
            return {holder for (holder,) in connection.execute("SELECT holder FROM leases")}


def done(claim: Claim) -> Done:
    return Done(claim.record.id, claim.record.revision, claim.token)


@asynccontextmanager
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    path = tmp_path / "delay.db"
    store, second = SqliteStore(path), SqliteStore(path)
    async with store, second, store.work("w", [LANE]) as work, second.work("other", [LANE]) as other:
        assert isinstance(work, SqliteWork)
        assert isinstance(other, SqliteWork)
        yield Stage(store, work, other)


# --- what a lock proves -----------------------------------------------------------------------------------


async def test_b2_the_messages_of_a_process_that_has_ended_return_at_the_next_look(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(3)
        claims = await there.claim()
        path = there.end()
        await there.look()
        assert not path.exists()
        assert there.holders() == set()
        assert await there.settle(claims[0]) is SettleOutcome.GONE
        again = (await there.other.claim({LANE: Demand(9)}, request=new_id(), lease_ms=LEASE_MS)).claims
        assert [(each.record.id, each.record.lapses) for each in again] == [("m0", 1), ("m1", 1), ("m2", 1)]


async def test_b2_the_messages_that_return_wake_the_worker_that_has_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "look_around", lambda _: None)  # writes of other processes wake nobody
    async with stage(tmp_path) as there:
        await there.put(1)
        await there.claim()
        there.end()
        there.other.clear()
        await there.look()
        await until(lambda: there.other.wakeup.is_set, "the worker is awake")


async def test_b2_the_messages_that_return_later_than_a_look_waits_wake_the_worker_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "look_around", lambda _: None)  # writes of other processes wake nobody
    monkeypatch.setattr(writer, "ANSWER_MS", 100)
    async with stage(tmp_path) as there:
        await there.put(1)
        await there.claim()
        there.end()
        there.other.clear()
        with closing(sqlite3.connect(there.store.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            await there.look()
            assert not there.other.wakeup.is_set
        await until(lambda: there.other.wakeup.is_set, "the worker is awake")


async def test_c1_a_cancelled_message_that_returns_wakes_the_worker_that_has_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends, and so another message of its key may begin."""
    monkeypatch.setattr(Writer, "look_around", lambda _: None)  # writes of other processes wake nobody
    async with stage(tmp_path) as there:
        await there.put(1)
        await there.claim()
        await there.store.apply([Cancel(new_op(), "m0")])
        there.end()
        there.other.clear()
        await there.look()
        await until(lambda: there.other.wakeup.is_set, "the worker is awake")


async def test_b1_two_workers_of_a_process_have_locks_of_their_own(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        for _ in range(3):
            assert await there.look() == PULSE_MS
        assert await there.settle(claim) is SettleOutcome.SETTLED


async def test_b1_a_worker_that_leaves_keeps_its_claims_until_their_leases_end(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        there.work.pulse.leave()
        await there.look()
        assert await there.settle(claim) is SettleOutcome.SETTLED


def delete(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.unlink()
    path.touch()


def copied(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def all_deleted(path: Path) -> None:
    shutil.rmtree(path.parent)


@pytest.mark.parametrize("damage", [delete, empty, copied, all_deleted])
async def test_b1_no_process_is_dead_because_somebody_has_deleted_or_replaced_its_file(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    async with stage(tmp_path) as there:
        await there.put(2)
        kept, returned = await there.claim()
        damage(there.file(there.work))
        await there.look()
        assert await there.settle(kept) is SettleOutcome.SETTLED
        await there.keep(returned.token)
        assert there.file(there.work).exists(), "it has locked a new file"
        await there.look()
        assert await there.work.settle([]) == []
        there.end()
        await there.look()
        assert await there.settle(returned) is SettleOutcome.GONE


async def test_b1_a_file_that_is_put_back_proves_nothing_after_the_worker_has_locked_another(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        path, away = there.file(there.work), tmp_path / "away"
        path.rename(away)
        await there.keep(claim.token)
        away.rename(path)
        await there.look()
        assert await there.settle(claim) is SettleOutcome.SETTLED


@pytest.mark.parametrize("call", [os.mkdir, os.open, os.chmod, fcntl.flock, os.write], ids=lambda call: call.__name__)
async def test_b1_a_file_proves_nothing_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Any]
) -> None:
    """Another worker looks after one of the calls by which a worker takes its lock."""
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        there.file(there.work).unlink()
        thread, looks = threading.get_ident(), 0

        def then_look(*arguments: Any) -> Any:  # noqa: ANN401 - those of any call
            nonlocal looks
            try:
                return call(*arguments)
            finally:
                if threading.get_ident() == thread and not looks:
                    looks += 1
                    there.other.pulse._look_at_others(2**60)

        monkeypatch.setattr(fcntl if call is fcntl.flock else os, call.__name__, then_look)
        there.work.pulse.step([claim.token])  # in this thread
        monkeypatch.undo()
        assert looks
        assert there.file(there.work).exists(), "if the other worker has deleted the file, there is a new one"
        assert await there.settle(claim) is SettleOutcome.SETTLED


async def test_b1_a_file_system_whose_locks_keep_nobody_out_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        await there.look()
        assert "has no locks between processes" in caplog.text
        assert await there.settle(claim) is SettleOutcome.SETTLED


async def test_b1_a_file_system_that_refuses_locks_leaves_the_leases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        for _ in range(2):
            await there.keep(claim.token)
            await there.look()
        assert caplog.text.count("wait for the end of their leases: the file system") == 2, "once for each worker"
        assert await there.settle(claim) is SettleOutcome.SETTLED


async def test_b1_a_directory_that_cannot_be_written_leaves_the_leases(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "delay.db-workers").touch()  # root may write to a directory that is read-only
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        await there.keep(claim.token)
        await there.look()
        assert "wait for the end of their leases: [Errno 20] Not a directory" in caplog.text
        assert await there.settle(claim) is SettleOutcome.SETTLED


# --- forks ------------------------------------------------------------------------------------------------


def forked(child: Callable[[], None]) -> None:
    """Run a function in a forked child, and wait for its end."""
    pid = os.fork()
    if not pid:
        try:
            child()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
async def test_b1_a_forked_child_drops_no_lock_of_its_parent(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        ours = tmp_path / "ours"
        ours.write_text("ours")

        def leave() -> None:
            for _ in range(20):  # one of these files gets the number that the locked file had in the parent
                os.open(ours, os.O_RDWR)
            there.work.pulse.leave()

        def collect() -> None:
            gc.collect()

        forked(leave)
        forked(collect)
        await there.look()
        assert ours.read_text() == "ours"
        assert await there.settle(claim) is SettleOutcome.SETTLED


# --- which claims return ----------------------------------------------------------------------------------


async def test_b1_all_messages_return_in_their_order_and_few_in_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as there:
        await there.put(2 * AT_ONCE + 1)
        await there.claim()
        sizes: list[int] = []
        write_apart = there.other.pulse._write_apart

        def counted(run: Callable[..., int], **options: Any) -> int:  # noqa: ANN401 - those of any transaction
            sizes.append(write_apart(run, **options))
            return sizes[-1]

        monkeypatch.setattr(there.other.pulse, "_write_apart", counted)
        there.end()
        await there.look()
        assert sizes == [AT_ONCE, AT_ONCE, 1]
        again = (await there.other.claim({LANE: Demand(500)}, request=new_id(), lease_ms=LEASE_MS)).claims
        assert [each.record.id for each in again] == [f"m{i}" for i in range(2 * AT_ONCE + 1)]


async def test_l5_a_suspect_in_a_trial_stays_claimed_until_its_lease_ends(tmp_path: Path) -> None:
    clock, path = VirtualClock(), tmp_path / "delay.db"
    store = SqliteStore(path, clock=clock)
    async with store, store.work("w", [LANE]) as work, store.work("other", [LANE]) as other:
        assert isinstance(work, SqliteWork)
        assert isinstance(other, SqliteWork)
        there = Stage(store, work, other)
        await there.put(1)
        for _ in range(2):
            await there.claim()
            await clock.advance(timedelta(milliseconds=LEASE_MS + 1))
        [suspect] = await there.claim()
        assert suspect.record.lapses == 2
        there.end()
        await there.look()
        assert await there.settle(suspect) is SettleOutcome.SETTLED


async def test_b1_a_worker_of_another_namespace_is_left_to_its_own_namespace(tmp_path: Path) -> None:
    shop = SqliteStore(tmp_path / "delay.db", namespace="shop")
    async with stage(tmp_path) as there, shop, shop.work("w", [LANE]) as work:
        assert isinstance(work, SqliteWork)
        await there.put(1)
        [claim] = await there.claim()
        ended = there.end()
        await asyncio.to_thread(work.pulse.step, ())
        assert ended.exists()
        await there.look()
        assert await there.settle(claim) is SettleOutcome.GONE


async def test_b1_the_claims_of_an_older_version_end_by_their_leases(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        with closing(sqlite3.connect(there.store.path)) as connection, connection:
            connection.execute("UPDATE leases SET holder = NULL")
        there.end()
        await there.look()
        assert await there.settle(claim) is SettleOutcome.SETTLED


async def test_v1_a_process_that_does_not_know_a_feature_returns_no_messages(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        await there.store.switch_on(["a feature of a newer version"])
        ended = there.end()
        await there.look()
        assert ended.exists()
        assert await there.settle(claim) is SettleOutcome.SETTLED


async def test_b1_a_renewed_claim_keeps_its_holder(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        to = token_for(there.store.now_ms() + LEASE_MS, token_counter(claim.token))
        renewal = Renewal(claim.record.id, claim.record.revision, claim.token, to, False)
        assert await there.work.renew([renewal]) == [RenewOutcome.RENEWED]
        assert there.holders() == {there.work.pulse.holder}


# --- quiet ------------------------------------------------------------------------------------------------


async def test_b2_a_worker_alone_takes_no_step_until_somebody_writes(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "delay.db") as store, store.work("w", [LANE]) as work:
        assert isinstance(work, SqliteWork)

        async def is_quiet() -> bool:
            return (await asyncio.to_thread(work.pulse.step, ())).wait_ms == QUIET_MS

        await until(is_quiet, "the watcher has seen the writes of the start")
        waiting = asyncio.create_task(asyncio.to_thread(work.pulse.wait, 2 * PULSE_MS))
        await asyncio.sleep(0)
        await store.apply([Put(new_op(), Envelope("m", LANE), After(60_000))])
        async with asyncio.timeout(PULSE_MS / 1000):
            await waiting
        assert not await is_quiet(), "the writer may lock its file a little later than it writes"
        assert (await asyncio.to_thread(work.pulse.step, [1])).wait_ms == PULSE_MS


async def test_b2_a_worker_has_locked_its_file_before_its_first_claim(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        assert there.file(there.work).exists()


async def test_r1_the_last_worker_leaves_no_file(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        there.end()
        (there.folder / f"{there.file(there.other).name.partition('-')[0]}-stray").touch()
        await there.look()
        assert [each.name for each in there.folder.iterdir()] == [there.file(there.other).name]
    assert os.listdir(tmp_path) == ["delay.db"]


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o664])
async def test_who_may_use_the_database_may_use_the_locks(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "delay.db"
    async with SqliteStore(path):
        pass
    path.chmod(mode)
    async with stage(tmp_path) as there:
        assert there.file(there.work).stat().st_mode & 0o777 == mode
        assert there.folder.stat().st_mode & 0o777 == {0o600: 0o700, 0o660: 0o770, 0o664: 0o775}[mode]


async def test_a_link_to_the_database_leads_to_the_same_locks(tmp_path: Path) -> None:
    link = tmp_path / "link.db"
    link.symlink_to("delay.db")
    async with stage(tmp_path) as there, SqliteStore(link) as store, store.work("third", [LANE]) as third:
        assert isinstance(third, SqliteWork)
        assert there.file(third).exists()


# --- while the event loop is blocked ----------------------------------------------------------------------


async def test_l1_b1_a_pulse_renews_and_settles_while_the_event_loop_is_blocked(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.put(2)
        first, second = await there.claim()
        to = token_for(there.store.now_ms() + LEASE_MS, token_counter(first.token))
        renewal = Renewal(first.record.id, first.record.revision, first.token, to, False)
        outcomes: list[object] = []

        def run() -> None:
            outcomes.extend(there.work.pulse.renew([renewal]))
            outcomes.extend(there.work.pulse.settle([done(replace(first, token=to)), done(second)]))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(PULSE_MS / 1000)  # the loop is blocked meanwhile
        assert outcomes == [RenewOutcome.RENEWED, SettleOutcome.SETTLED, SettleOutcome.SETTLED]


async def test_l1_a_pulse_does_not_wait_for_a_file_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "ANSWER_MS", ANSWER_MS)
    async with stage(tmp_path) as there:
        await there.put(1)
        [claim] = await there.claim()
        with closing(sqlite3.connect(there.store.path, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailableError, match="did not answer within a second"):
                await asyncio.to_thread(there.work.pulse.settle, [done(claim)])
