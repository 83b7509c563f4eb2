"""Make a store with data for every screen of the page. The data are always the same."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from random import Random

from aiodelay import Cron, Every
from aiodelay.core.ids import new_op
from aiodelay.core.values import (
    Again,
    At,
    Claim,
    Conflict,
    Dead,
    Demand,
    Done,
    Envelope,
    Lane,
    Put,
    Registered,
    Settlement,
    Stored,
)
from aiodelay.memory import MemoryStore
from aiodelay.ports import Work
from aiodelay.recurrence import Rule, encode_rule
from aiodelay.testing.clock import VirtualClock

__all__ = ["NOW", "ORDER", "SceneStore", "at_ms", "scene"]

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
BEGIN = NOW - timedelta(hours=1)
MONDAY = datetime(2026, 11, 23, 8, 0, tzinfo=UTC)
ORDER = "order/7 <b>&amp;</b>"
"""An id that must be escaped in HTML and in URLs."""
MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
TRACEBACK = """Traceback (most recent call last):
  File "/srv/shop/handlers.py", line 41, in charge_card
    await bank.charge(event.order, "<script>")
"""
INSTANCES = ("checkout-1-4711-9f2c01ab", "mailer-1-52-77aa10c3")
SERVED = ("CheckPayment", "SendReceipt", "ChargeCard", "Heartbeat", "RenewContract", "webhook")


def at_ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


class SceneStore(MemoryStore):
    """A memory store that also lists consumers of topics, as a Redis store does."""

    name = "redis://queue.example:6379"

    async def registered(self, topic: str | None = None) -> Sequence[Registered]:
        now = at_ms(NOW)
        since = now - 3 * DAY
        return [
            Registered("orders", "fan-out", "billing", True, since, now - 2_000, 0, 1, 0, 0, None),
            Registered("orders", "fan-out", "search-index", False, since, now - 4_000, 1_840, 100, 3, 0, None),
            Registered("orders", "fan-out", "warehouse", False, since + HOUR, now - 5 * HOUR, 312, 0, 0, 250, None),
            Registered("payments", "log", "ledger", True, since, now - 1_000, 3, 1, 0, 0, 48_211),
            Registered("payments", "log", "report", False, since + DAY, None, 48_215, 0, 0, 0, 0),
        ]

    @asynccontextmanager
    async def work(self, worker: str, lanes: Collection[Lane]) -> AsyncIterator[Work]:
        """Open a worker, with instance names that are the same on every machine."""
        async with super().work(worker if worker in INSTANCES else "page-1-6-1f4c77d0", lanes) as work:
            yield work


class _Maker:
    """Puts messages, and lets time pass while workers claim and settle them."""

    def __init__(self, store: MemoryStore, clock: VirtualClock) -> None:
        self.store, self.clock = store, clock

    def until(self, at: int) -> None:
        """Let time pass until `at`."""
        self.clock.move(max(at - self.clock.now_ms(), 0))

    async def put(
        self,
        message_id: str,
        lane: str,
        due_ms: int,
        payload: object,
        *,
        address: str = "",
        rule: Rule | None = None,
        key: bytes | None = None,
        headers: dict[str, bytes] | None = None,
    ) -> None:
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        envelope = Envelope(
            message_id,
            lane,
            address,
            "",
            "" if isinstance(payload, bytes) else "json",
            raw,
            key,
            headers or {},
            rule=None if rule is None else encode_rule(rule),
        )
        (outcome,) = await self.store.apply([Put(new_op(), envelope, At(due_ms), Conflict.replace())])
        assert isinstance(outcome, Stored), outcome

    async def claim(self, work: Work, *lanes: str, limit: int = 100) -> list[Claim]:
        demand = {lane: Demand(limit) for lane in lanes}
        request = new_op().hex()
        return list((await work.claim(demand, request=request, lease_ms=15_000)).claims)

    async def settle(self, work: Work, settlements: Sequence[Settlement]) -> None:
        for outcome in await work.settle(settlements):
            assert outcome.value == "settled", outcome


@asynccontextmanager
async def scene(*, letters: int = 9) -> AsyncIterator[SceneStore]:
    """Yield the store. Instances serve it during the block.

    Args:
        letters: The number of dead letters in the largest group.
    """
    clock = VirtualClock(start=BEGIN)
    store = SceneStore(clock=clock, journal=10_000)
    made, random = _Maker(store, clock), Random(7)
    begin, now = at_ms(BEGIN), at_ms(NOW)
    async with (
        store,
        store.work(INSTANCES[0], SERVED) as work,
        store.work(INSTANCES[1], ["SendReceipt"]),
    ):
        await _history(made, work, random, begin, letters)
        made.until(now - 40_000)
        await _standing(made, work, random, now)
        made.until(now)
        for each in store._table.workers:
            store._claiming.tidy(each, each.lanes, 100, store.now_ms())
        yield store


async def _history(made: _Maker, work: Work, random: Random, begin: int, letters: int) -> None:
    """Make messages that were delivered or given up."""
    for n in range(240):
        await made.put(f"paid-{n}", "CheckPayment", begin + 1_000 + n * 5_000, {"order": n})
    for n in range(240):
        due = begin + 1_000 + n * 5_000
        made.until(due + min(int(random.expovariate(1 / 6)), 900) + (800 if n % 97 == 0 else 0))
        claims = await made.claim(work, "CheckPayment")
        await made.settle(work, [Done(c.record.id, c.record.revision, c.token) for c in claims])
    at = begin + 21 * MINUTE
    await made.put("vid-5", "webhook", at + 5, {"video": 5}, address="eu-1")
    await made.put("vid-6", "webhook", at + 5, b"\x00\x01\x82\xff broken", address="eu-1")
    for n in range(letters):
        due = at + 5 + n * 20_000
        await made.put(f"card-{n:03}", "ChargeCard", due, {"order": 900 + n, "card": "…4242"})
        made.until(due + 7)
        dead = await made.claim(work, "ChargeCard", "webhook")
        await made.settle(work, [_dead(each) for each in dead])


def _dead(claim: Claim) -> Dead:
    record = claim.record
    if record.envelope.lane == "ChargeCard":
        error = "CardExpiredError: refused by the bank\n  at charge.py:41 in charge_card"
        traceback = f"{TRACEBACK}{error}\n"
        return Dead(record.id, record.revision, claim.token, "attempts_exhausted", 3, error, traceback=traceback)
    reason = "undecodable" if record.id == "vid-6" else "rejected"
    error = "404 Not Found" if reason == "rejected" else "no JSON: byte 0"
    return Dead(record.id, record.revision, claim.token, reason, 1, error)  # type: ignore[arg-type]


async def _standing(made: _Maker, work: Work, random: Random, now: int) -> None:
    """Make messages that are pending, in flight, paused, or waiting for a retry."""
    for n in range(180):
        due = now + int(random.gauss(24, 9) * MINUTE) if n % 3 else now + random.randrange(60) * MINUTE
        await made.put(f"check-{1000 + n}", "CheckPayment", max(due, now + 5_000), {"order": 1000 + n})
    for n in range(90):
        due = now + int(HOUR + random.random() * 22 * HOUR)
        await made.put(f"receipt-{n}", "SendReceipt", due, {"order": n, "to": f"customer-{n}@example.com"})
    for n in range(400):
        due = now + int(DAY + random.betavariate(2, 3) * 29 * DAY)
        await made.put(f"contract-{n}", "RenewContract", due, {"contract": n})
    for n in range(6):
        await made.put(f"hook-{n}", "webhook", now + n * 7 * MINUTE, {"video": n}, address="eu-1" if n % 2 else "us-1")
    for n in range(4):
        await made.put(f"refund-{n}", "RefundDue", now - 30_000 + n * 1_000, {"refund": n})
    await made.put("heartbeat", "Heartbeat", now + 20_000, {}, rule=Every("30s"))
    mondays = Cron("0 9 * * mon", tz="Europe/Paris")
    await made.put("monday-report", "SendReceipt", at_ms(MONDAY), {"report": "week"}, rule=mondays)
    await _order(made, work, now)
    for n in range(3):
        await made.put(f"now-{n}", "SendReceipt", now - 2_004, {"order": 70 + n})
    made.until(now - 2_000)
    assert len(await made.claim(work, "SendReceipt")) == 3
    await made.store.pause("webhook", "us-1")


async def _order(made: _Maker, work: Work, now: int) -> None:
    """Make the message with the longest timeline: two attempts have failed."""
    payload = {"order": 7, "customer": {"name": "Ada <script>alert(1)</script>", "tenant": "nord"}, "items": [1, 2, 3]}
    headers = {"x-tenant": b"nord", "x-request": b"8c1f"}
    await made.put(ORDER, "CheckPayment", now - 38_000, payload, key=b"customer-7", headers=headers)
    for attempt, (at, again) in enumerate(((now - 37_980, now - 20_000), (now - 19_995, now + 4 * MINUTE)), 1):
        made.until(at)
        (claim,) = await made.claim(work, "CheckPayment")
        error = ("TimeoutError: no answer of payments.example within 30 s", "PaymentsAwayError: 503")[attempt - 1]
        record = claim.record
        await made.settle(work, [Again(record.id, record.revision, claim.token, again, attempt, error)])
