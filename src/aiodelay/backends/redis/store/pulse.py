"""`RedisPulse`: the pulse of one worker. It has an event loop and a connection of its own, for a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from uuid import uuid4

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.scripts import Arg
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.records.shards import ShardLayout
from aiodelay.core import pulse
from aiodelay.core.values import Renewal, RenewOutcome, Settlement, SettleOutcome
from aiodelay.errors import StoreUnavailableError
from aiodelay.ports.clock import SystemClock
from aiodelay.ports.pulse import Step

from .lease_arguments import (
    RENEWED,
    RENEWED_AT_ONCE,
    ROOM,
    SETTLED,
    cost_of_change,
    divided,
    renewal_arguments,
    settlement_arguments,
)

__all__ = ["RedisPulse"]

T = TypeVar("T")

log: logging.Logger = logging.getLogger("aiodelay.redis")

FRESH_MS = 2 * pulse.PULSE_MS
"""Claims name the incarnation only if the last step is not older. A process whose steps fail relies on its leases."""
RETURNED_AT_ONCE = 60
IDLE_STEPS = 2
"""After this many steps without claims, the process deletes its number. After one step, claims may be on their way."""


class _Call:
    """A claim or renewal that names the incarnation of its time.

    Attributes:
        arguments: The incarnation, and whether the store is known to hold its number.
    """

    def __init__(self, owner: RedisPulse, incarnation: str, *, is_registered: bool, sent_ms: int) -> None:
        self._owner, self._incarnation, self._sent_ms = owner, incarnation, sent_ms
        self.arguments: tuple[str, int] = incarnation, int(is_registered)

    def answered(self, number: int) -> None:
        """Note the number in the answer: 0 = the store holds an earlier one; -1 = it has refused the incarnation."""
        self._owner.note(self._incarnation, number, self._sent_ms)


class RedisPulse:
    """The pulse of one worker at one opening of the store.

    Args:
        client: A client that only this object uses.
        keys: The keys of the namespace.
        name: The name of the store in errors.
        now_ms: The time that scripts use; None = the server's time.

    Attributes:
        woken: Set to end the present or the next `wait`. The pulses of several shards share one event.
    """

    def __init__(self, client: Client, keys: Keys, name: str, now_ms: Callable[[], int | None]) -> None:
        self._client, self._keys, self._name, self._now_ms = client, keys, name, now_ms
        self._clock, self._lock = SystemClock(), threading.Lock()
        self._incarnation, self._life = _new_incarnation(), pulse.Life()
        self._watch = pulse.Watch()
        self._runner: asyncio.Runner | None = None
        self._heard_ms: float = pulse.NEVER
        self._calls = self._idle_steps = 0
        self.woken: threading.Event = threading.Event()
        self._is_quiet = False  # whether the next step is far ahead, because nobody holds claims
        self._is_proven = False  # whether the server lets this process run the script, by its last answer
        self._has_unnamed = False  # whether this process may hold claims that no incarnation is recorded for
        self.found_layout: ShardLayout | None = None
        """The layout with which the server has refused a call; None if it has refused none."""

    # --- on the event loop of the store -------------------------------------------------------------------

    @property
    def is_calling(self) -> bool:
        """Whether a claim or renewal is on its way that names the present incarnation."""
        return self._calls > 0

    @contextmanager
    def call(self) -> Iterator[_Call]:
        """Return a context manager around one claim or renewal, with the arguments of its script."""
        with self._lock:
            life = self._life
            self._end_quiet()
            is_named = (life.is_registered or self._is_fresh()) and not self.is_refused
            incarnation = self._incarnation if is_named else ""
            sent_ms = self._clock.monotonic_ms()
            call = _Call(self, incarnation, is_registered=life.is_registered, sent_ms=sent_ms)
            self._calls += 1
            self._idle_steps = 0
        try:
            yield call
        finally:
            with self._lock:
                self._calls -= 1

    def note(self, incarnation: str, number: int, sent_ms: int) -> None:
        """Note the number in the answer to a call that was sent at `sent_ms`, unless the incarnation is over."""
        with self._lock:
            if not incarnation:
                self._has_unnamed = True
            elif incarnation == self._incarnation and number:
                self._note(number, sent_ms)

    @property
    def is_refused(self) -> bool:
        """Whether this process needs a new incarnation."""
        return self._life.begin_until_ms == pulse.NEVER

    def may_begin(self) -> bool:
        """Return whether a run may begin now: nobody can have declared this process dead."""
        return pulse.may_begin(self._life, self._clock.monotonic_ms())

    def follow(self, *, is_refused: bool) -> None:
        """Begin in the place of a pulse of another layout. That pulse may have recorded claims; this one has not.

        Args:
            is_refused: Whether others may have declared the process dead before.
        """
        with self._lock:
            self._has_unnamed = True
            if is_refused:
                self._life = pulse.refused(self._life)

    def restart(self) -> None:
        """Take a new incarnation after a refusal."""
        with self._lock:
            self._begin_again()

    def wake(self) -> None:
        """End the current or the next `wait`."""
        self.woken.set()

    def _end_quiet(self) -> None:
        """Let the thread take a step now, so that a claim may name the incarnation."""
        if self._is_quiet:
            self._is_quiet, self._heard_ms = False, self._clock.monotonic_ms()
            self.woken.set()

    # --- on the thread ------------------------------------------------------------------------------------

    def step(self, tokens: Collection[int]) -> Step:
        """Increase the number, read the numbers of others, and declare processes dead whose numbers stand still."""
        could_begin = self.may_begin()
        self._leave_if_idle(tokens)
        asked_ms = self._clock.monotonic_ms()
        incarnation = self._incarnation
        try:
            number, numbers = self._run(self._ask(incarnation, tokens))
        except (Fault, TimeoutError) as error:
            log.debug("a pulse failed: %r", error)
            self._watch, self._is_proven = pulse.Watch(), False
            self.found_layout = _layout_of(error)
            self._judge_silence(asked_ms if could_begin and self.found_layout is not None else None)
            wait_ms = pulse.AGAIN_MS
        else:
            self._is_proven = True
            answered_ms = self._heard_ms = self._clock.monotonic_ms()
            self.note(incarnation, number, asked_ms)
            numbers.pop(incarnation, None)
            self._watch = pulse.answered(self._watch, numbers, asked_ms, answered_ms)
            self._bury_stopped(asked_ms + pulse.PULSE_MS)
            wait_ms = pulse.QUIET_MS if self._falls_quiet(tokens) else self._watch.wait_ms(self._clock.monotonic_ms())
        has_resumed = self._is_fresh() and self.may_begin() and (self._has_unnamed or not could_begin)
        if has_resumed:
            self._has_unnamed = False
        return Step(wait_ms, self.is_refused, has_resumed)

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases while the event loop is blocked. Return one outcome for each renewal, in order."""
        with self.call() as call:
            return self._answered(_renewed(self._client, call, renewals, self._now_ms()))

    def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """End claims while the event loop is blocked. Return one outcome for each settlement, in order."""
        return self._answered(_settled(self._client, settlements, self._now_ms()))

    def _answered(self, call: Coroutine[Any, Any, T]) -> T:
        try:
            answer: T = self._run(call)
        except (Fault, TimeoutError) as error:
            self.found_layout = _layout_of(error)
            reason = error.reason if isinstance(error, Fault) else f"no answer in {pulse.ANSWER_MS} ms"
            raise StoreUnavailableError(self._name, reason) from error
        return answer

    def wait(self, ms: int) -> None:
        """Wait for the next step, at most `ms`. A claim ends a long wait."""
        self.woken.wait(ms / 1000)
        self.woken.clear()

    def _falls_quiet(self, tokens: Collection[int]) -> bool:
        with self._lock:
            is_busy = tokens or self._calls or self._life.is_registered or self._watch.seen or self._has_unnamed
            self._is_quiet = not is_busy
            return self._is_quiet

    def leave(self) -> None:
        """Delete the number, and close the connection."""
        with self._lock:
            incarnation, is_registered = self._incarnation, self._life.is_registered
            self._begin_again()
        if is_registered:
            with suppress(Fault, TimeoutError):
                self._run(_forgotten(self._client, self._keys, incarnation))
        if self._runner is not None:
            with suppress(Fault, TimeoutError):
                self._run(self._client.aclose())
            self._runner.close()

    def _is_fresh(self) -> bool:
        return self._clock.monotonic_ms() - self._heard_ms <= FRESH_MS

    def _run(self, call: Awaitable[Any]) -> Any:  # noqa: ANN401 - what the call returns
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(_in_time(call))

    async def _ask(self, incarnation: str, tokens: Collection[int]) -> tuple[int, dict[str, int]]:
        """Return the new number of the incarnation, 0 if it has none, and the numbers of all incarnations."""
        is_registered = self._life.is_registered
        if is_registered or not self._is_proven:
            arguments: list[Arg] = [incarnation, self._life.number, str(min(tokens, default=""))]
            number, found = await self._client.run("pulse", arguments, now_ms=self._now_ms())
            number = number if is_registered else 0
        else:
            number, found = 0, await self._client.command("HGETALL", self._keys.key("pulses"))
        if isinstance(found, dict):  # protocol 3
            return number, {name.decode(): int(each) for name, each in found.items()}
        return number, {name.decode(): int(each) for name, each in zip(found[::2], found[1::2], strict=True)}

    def _note(self, number: int, sent_ms: int) -> None:
        if number == pulse.DEAD:
            log.warning("others have declared this process dead: it stood still, or did not reach the server for 3 s")
            self._life = pulse.refused(self._life)
        elif not self.is_refused:
            self._life = pulse.registered(self._life, number, sent_ms)

    def _judge_silence(self, refused_since_ms: int | None) -> None:
        """Give up the incarnation if others may have declared it dead. Its process then relies on its leases.

        Args:
            refused_since_ms: The time of a question that the server refused because of the layout. From then on, nobody
                can have declared this process dead: such scripts are refused too, and the new layout does not have the
                number of this incarnation. None = there was no such answer.
        """
        with self._lock:
            if not self._life.is_registered or self.is_refused:
                return
            if refused_since_ms is not None:
                self._life = pulse.registered(self._life, self._life.number, refused_since_ms)
            elif not self.may_begin():
                log.warning("this process did not reach the server for 3 s; others may have declared it dead")
                self._life = pulse.refused(self._life)

    def _leave_if_idle(self, tokens: Collection[int]) -> None:
        """Delete the number of a process that holds no claims: an idle process only reads."""
        with self._lock:
            self._idle_steps = 0 if tokens or self._calls else self._idle_steps + 1
            if self._idle_steps < IDLE_STEPS or not self._life.is_registered or not self.may_begin():
                return
            incarnation = self._incarnation
            self._begin_again()
        with suppress(Fault, TimeoutError):
            self._run(_forgotten(self._client, self._keys, incarnation))

    def _begin_again(self) -> None:
        self._incarnation, self._life, self._idle_steps = _new_incarnation(), pulse.Life(), 0

    def _bury_stopped(self, by_ms: int) -> None:
        """Declare processes dead, and return their messages, until a time. The next step goes on."""
        for incarnation, number in self._watch.stopped():
            returned, is_left = 0, True
            try:
                while is_left and self._clock.monotonic_ms() < by_ms:
                    arguments: list[Arg] = [incarnation, number, RETURNED_AT_ONCE]
                    count, is_left = self._run(self._client.run("bury", arguments, now_ms=self._now_ms()))
                    returned += count
            except (Fault, TimeoutError) as error:
                log.debug("returning the messages of a process that has ended failed: %r", error)
                return
            if returned:
                log.warning("a process has ended or stands still; %d of its messages were returned", returned)


async def _renewed(
    client: Client, call: _Call, renewals: Sequence[Renewal], now_ms: int | None
) -> Sequence[RenewOutcome]:
    outcomes: list[RenewOutcome] = []
    while left := renewals[len(outcomes) : len(outcomes) + RENEWED_AT_ONCE]:
        arguments: list[Arg] = [*call.arguments, *renewal_arguments(left)]
        _, letters, number = await client.run("renew", arguments, now_ms=now_ms)
        call.answered(number)
        outcomes += [RENEWED[letter] for letter in letters]
    return outcomes


async def _settled(client: Client, settlements: Sequence[Settlement], now_ms: int | None) -> Sequence[SettleOutcome]:
    outcomes: list[SettleOutcome] = []
    for _, part in divided((), [(i, each, cost_of_change(None)) for i, each in enumerate(settlements)]):
        arguments: list[Arg] = [0, 0]  # no plain claims, and so no memories of them
        for _, settlement, _ in part:
            arguments += settlement_arguments(settlement)
        letters = await client.run("settle", arguments, now_ms=now_ms)
        outcomes += [SETTLED[letter] for letter in letters.removesuffix(ROOM)]
    return outcomes


async def _forgotten(client: Client, keys: Keys, incarnation: str) -> None:
    """Delete the keys of an incarnation. If this fails, another process declares it dead and deletes them."""
    await client.command("HDEL", keys.key("pulses"), incarnation)
    await client.command("UNLINK", keys.key(f"held:{incarnation}"))


def _layout_of(error: Exception) -> ShardLayout | None:
    """Return the layout of the namespace if the server refused a call because of the layout."""
    return error.layout if isinstance(error, Fault) else None


async def _in_time(call: Awaitable[Any]) -> Any:  # noqa: ANN401 - what the call returns
    async with asyncio.timeout(pulse.ANSWER_MS / 1000):
        return await call


def _new_incarnation() -> str:
    return uuid4().hex[:16]
