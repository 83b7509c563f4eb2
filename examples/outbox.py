"""Place an order and schedule its reminder in one database transaction: both happen, or neither does.

Run it: python examples/outbox.py    (needs pip install "sqlalchemy[asyncio]" aiosqlite)

The transaction writes the message into a table, the outbox. The relay moves committed messages into the scheduler. Kill
the program at any point and start it again with the same database and store as arguments: no reminder is lost, and none
comes twice. In production, use real servers:
`python examples/outbox.py postgresql+asyncpg://localhost/shop redis://localhost`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import msgspec
from sqlalchemy import BigInteger, Integer, delete, func, select, update
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from aiodelay import (
    Conflict,
    InputError,
    Message,
    PartlyScheduledError,
    Scheduler,
    StoreError,
    UnknownSinkError,
    event,
)

POLL_S = 0.1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

log = logging.getLogger("outbox")


class Table(DeclarativeBase):
    pass


# --- the outbox ---------------------------------------------------------------------------------------------


class Outbox(Table):
    __tablename__ = "outbox"
    __table_args__ = ({"sqlite_autoincrement": True},)  # SQLite must not use the number of a deleted row again

    number: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    id: Mapped[str]
    target: Mapped[str]
    payload: Mapped[bytes]
    due_ms: Mapped[int] = mapped_column(BigInteger)
    refused: Mapped[str | None]


def schedule(
    session: AsyncSession, payload: object, *, to: str, delay: timedelta, message_id: str | None = None
) -> None:
    """Write a message to the outbox. It is scheduled if, and only if, the session's transaction is committed."""
    due_ms = (datetime.now(UTC) + delay - EPOCH) // timedelta(milliseconds=1)
    session.add(Outbox(id=message_id or str(uuid4()), target=to, payload=msgspec.json.encode(payload), due_ms=due_ms))


async def relay(database: AsyncEngine, scheduler: Scheduler, stop: asyncio.Event) -> None:
    """Move rows into the scheduler until `stop` is set.

    Set `stop` instead of cancelling the task: a task cancelled inside a transaction loses its connection.
    """
    while not stop.is_set():
        try:
            moved = await move_rows(database, scheduler)
        except (StoreError, SQLAlchemyError, OSError) as error:
            log.warning("the outbox waits: %s", error)
            moved = 0
        if not moved:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), POLL_S)


async def move_rows(database: AsyncEngine, scheduler: Scheduler) -> int:
    """Schedule up to 100 rows and delete them, in one transaction. Return the number of rows.

    If the process is killed between the two steps, the relay schedules the rows again. This changes nothing, because
    the number of the row is the version of the message. This is also true if the message was delivered or cancelled
    in the meantime.
    """
    oldest = select(Outbox).where(Outbox.refused.is_(None)).order_by(Outbox.number).limit(100)
    async with AsyncSession(database) as session, session.begin():
        rows = (await session.scalars(oldest.with_for_update(skip_locked=True))).all()
        messages = [
            Message(
                row.payload,
                at=EPOCH + timedelta(milliseconds=row.due_ms),
                id=row.id,
                to=row.target,
                conflict=Conflict.newer(row.number),
            )
            for row in rows
        ]
        try:
            await scheduler.schedule_many(messages)
        except PartlyScheduledError as error:
            for rejected in error.rejected:
                if not isinstance(rejected.error, InputError | UnknownSinkError):
                    raise rejected.error from error
                rows[rejected.position].refused = str(rejected.error)  # the row stays, so that somebody can inspect it
        scheduled = [row.number for row in rows if row.refused is None]
        await session.execute(delete(Outbox).where(Outbox.number.in_(scheduled)))
    return len(rows)


# --- the shop -----------------------------------------------------------------------------------------------


class Order(Table):
    __tablename__ = "orders"

    number: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str]


@event("payment.remind")
@dataclass
class RemindOfPayment:
    order: int


async def place_order(database: AsyncEngine, number: int) -> None:
    async with AsyncSession(database) as session, session.begin():
        session.add(Order(number=number, state="placed"))
        schedule(
            session,
            RemindOfPayment(number),
            to="handler:payment.remind",
            delay=timedelta(seconds=2),
            message_id=f"remind-{number}",
        )
        if number == 3:
            raise ValueError("there is no product 3")
    print(f"order {number} is placed")


async def pay(database: AsyncEngine, scheduler: Scheduler, number: int) -> None:
    async with AsyncSession(database) as session, session.begin():
        await session.execute(update(Order).where(Order.number == number).values(state="paid"))
    await scheduler.cancel(f"remind-{number}")  # only saves work: the handler checks whether the order is paid
    print(f"order {number} is paid")


async def remind(database: AsyncEngine, event: RemindOfPayment) -> None:
    """Remind the customer if the order is not paid. One statement checks and records this, so a repeat does nothing."""
    due = update(Order).where(Order.number == event.order, Order.state == "placed").values(state="reminded")
    async with AsyncSession(database) as session, session.begin():
        if (await session.execute(due.returning(Order.number))).all():
            print(f"please pay order {event.order}")


async def main(database_url: str, store_url: str) -> None:
    database = create_async_engine(database_url)
    async with database.begin() as connection:
        await connection.run_sync(Table.metadata.create_all)
    scheduler = Scheduler(store_url, namespace="outbox")

    @scheduler.handler
    async def handle(event: RemindOfPayment) -> None:
        await remind(database, event)

    async with scheduler, asyncio.TaskGroup() as tasks:
        stop = asyncio.Event()
        tasks.create_task(relay(database, scheduler, stop))
        for number in (1, 2, 3):
            try:
                await place_order(database, number)
            except ValueError as error:
                print(f"order {number} is not placed, and nobody reminded: {error}")
            except IntegrityError:
                print(f"order {number} was placed before")
        await pay(database, scheduler, 2)
        async with AsyncSession(database) as session:
            while await session.scalar(select(func.count()).select_from(Outbox)):  # noqa: ASYNC110 - no event to await
                await asyncio.sleep(POLL_S)
        await scheduler.run_until_idle()
        stop.set()
    await database.dispose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        defaults = [f"sqlite+aiosqlite:///{folder}/shop.db", f"sqlite:///{folder}/delay.db"]
        asyncio.run(main(*[*sys.argv[1:], *defaults[len(sys.argv) - 1 :]]))
