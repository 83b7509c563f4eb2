"""Plans, which callers confirm, and operations, which carry out confirmed plans in the background."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from aiodelay.core.values import DeadKey
from aiodelay.operations.queries import DeadFilter, DeadPlace, Filter, Place
from aiodelay.ports.clock import Clock, SystemClock

from .problems import ApiError

__all__ = ["PLAN_MS", "RUNNING", "Operation", "Operations", "Plan", "Plans", "Rest", "Target"]

PLAN_MS = 300_000
PLANS = 64
KEPT = 64
"""The most ended operations whose results are kept."""
RUNNING = 8
"""The most operations that run at the same time."""
CLOSE_S = 5.0
Target: TypeAlias = str | DeadKey
"""A message id, the name of a destination, or the key of a dead letter."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The unfinished part of a plan's search. The operation finishes the search before it changes anything.

    Attributes:
        wanted: The filter.
        after: The place at which the search goes on; None = the beginning.
    """

    wanted: Filter | DeadFilter
    after: Place | DeadPlace | None


@dataclass(frozen=True, slots=True)
class Plan:
    """An action and its targets. A caller may confirm the plan, once.

    Attributes:
        action: The name of the action.
        by: The caller that may confirm the plan.
        store: The name of the store.
        targets: The messages, destinations or dead letters found so far.
        series: The recurring series found so far that a cancel would end. `targets` does not contain these series.
        with_series: Whether the action ends the series too.
        rest: The search for further targets; None = the plan has all targets.
        examined: The number of messages or dead letters compared with the filter.
        of: The number of messages or dead letters to compare in all; None if an index answered.
        options: The options of the action.
    """

    action: str
    by: str
    store: str
    targets: Sequence[Target] = ()
    series: Sequence[str] = ()
    with_series: bool = False
    rest: Rest | None = None
    examined: int = 0
    of: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The ids of the targets."""
        return [each.id if isinstance(each, DeadKey) else each for each in self.targets]


class Plans:
    """Keeps each plan for five minutes. If there are too many plans, a new plan drops the oldest plan.

    Args:
        clock: Measures intervals.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._plans: OrderedDict[str, tuple[int, Plan]] = OrderedDict()

    def add(self, plan: Plan) -> str:
        """Store the plan and return its confirmation token."""
        token = secrets.token_urlsafe(16)
        self._plans[token] = self._clock.monotonic_ms() + PLAN_MS, plan
        while len(self._plans) > PLANS:
            self._plans.popitem(last=False)
        return token

    def drop(self, token: str) -> None:
        """Drop a plan that is being carried out, so that it cannot be carried out again."""
        del self._plans[token]

    def find(self, token: str, *, by: str, store: str) -> Plan:
        """Return the plan that a confirmation token names.

        Raises:
            ApiError: There is no plan with this token, or it belongs to another caller or another store.
        """
        ends_ms, plan = self._plans.get(token, (0, None))
        if plan is None or (plan.by, plan.store) != (by, store) or ends_ms < self._clock.monotonic_ms():
            raise ApiError(404, "PlanNotFoundError", "the plan does not exist any more; plan the action again")
        return plan


class Operation:
    """The execution of a confirmed plan: the progress, and later the result.

    Args:
        token: The token of the plan, which also names the operation.
        plan: The action and its targets.
        now_ms: The start of the operation, epoch ms.

    Attributes:
        state: `finding` (it looks for targets) or `changing` (it changes them). An operation ends as `done`, as
            `stopped` (by a caller) or as `failed`.
        found: The number of targets found so far.
        series: All recurring series found. The operation either ends all of them or leaves all of them unchanged.
        changed: The number of targets whose outcome is known.
        outcomes: The number of targets by outcome.
        error: The reason of a failure; "" if there is no failure.
        began_ms: The start of the operation, epoch ms.
        ended_ms: The end of the operation, epoch ms; None while it runs.
        is_stopping: Whether a caller has stopped the operation, which ends after its current step.
    """

    def __init__(self, token: str, plan: Plan, now_ms: int) -> None:
        self.token: str = token
        self.plan: Plan = plan
        self.state: Literal["finding", "changing", "done", "stopped", "failed"] = "finding"
        self.found: int = len(plan.targets)
        self.changed: int = 0
        self.series: list[str] = list(plan.series)
        self.outcomes: Counter[str] = Counter()
        self.error = ""
        self.began_ms = now_ms
        self.ended_ms: int | None = None
        self.is_stopping = False
        self._ended = asyncio.Event()

    def end(self, state: Literal["done", "stopped", "failed"], now_ms: int) -> None:
        """Record the end of the operation, and wake the callers of `wait`."""
        self.state, self.ended_ms = state, now_ms
        self._ended.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for the operation's end, at most this many seconds; return whether it has ended."""
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            pass
        return self.ended_ms is not None


class Operations:
    """Runs the bulk operations of one app, at most `RUNNING` at the same time, and keeps the latest results.

    Args:
        clock: Gives the times at which operations begin and end.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._operations: OrderedDict[str, Operation] = OrderedDict()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, token: str) -> bool:
        return token in self._operations

    def start(self, token: str, plan: Plan, carry_out: Callable[[Operation], Awaitable[object]]) -> Operation:
        """Start an operation in the background.

        Args:
            token: The token of the plan.
            plan: The action and its targets.
            carry_out: Carries out the plan. It may raise an error, which ends the operation as `failed`.

        Raises:
            ApiError: Too many operations are running.
        """
        if len(self._tasks) >= RUNNING:
            detail = f"{RUNNING} bulk operations are running, and no more are allowed; wait until one ends, or stop one"
            raise ApiError(503, "TooManyOperationsError", detail)
        operation = self._operations[token] = Operation(token, plan, self._clock.now_ms())
        self._tasks[token] = asyncio.create_task(self._run(operation, carry_out), name=f"aiodelay bulk {plan.action}")
        while len(self._operations) > KEPT + len(self._tasks):
            self._operations.pop(next(each for each in self._operations if each not in self._tasks))
        return operation

    async def _run(self, operation: Operation, carry_out: Callable[[Operation], Awaitable[object]]) -> None:
        state: Literal["done", "stopped", "failed"] = "failed"
        try:
            await carry_out(operation)
            state = "failed" if operation.error else "stopped" if operation.is_stopping else "done"
        except asyncio.CancelledError:
            operation.error = "the service ended"
            raise
        finally:
            operation.end(state, self._clock.now_ms())
            del self._tasks[operation.token]

    def find(self, token: str, *, store: str) -> Operation:
        """Return the operation with a token, on the given store.

        Raises:
            ApiError: No operation on this store has that token.
        """
        operation = self._operations.get(token)
        if operation is None or operation.plan.store != store:
            raise ApiError(
                404, "OperationNotFoundError", "no such bulk operation; the service keeps only the latest results"
            )
        return operation

    def all(self, *, store: str) -> list[Operation]:
        """Return the operations on a store, latest first."""
        return [each for each in reversed(self._operations.values()) if each.plan.store == store]

    def running(self, *, store: str) -> list[Operation]:
        """Return the operations on a store that have not ended, latest first."""
        return [each for each in self.all(store=store) if each.ended_ms is None]

    async def aclose(self) -> None:
        """End each operation after its current step. Cancel an operation if its step takes too long."""
        for token in self._tasks:
            self._operations[token].is_stopping = True
        running = list(self._tasks.values())
        if running:
            _, late = await asyncio.wait(running, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
