"""Wrappers that record the calls of a scheduler: its commands, claims, settlements and renewals.

A wrapper writes each call to the history before the call begins, and the answer as soon as it comes. A wrapper does not
write claims that return no messages.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from aiodelay.core.values import (
    Again,
    At,
    Claim,
    Claimed,
    Command,
    Dead,
    Demand,
    Fire,
    Lane,
    LateAction,
    Put,
    Refused,
    Renewal,
    RenewOutcome,
    Reschedule,
    Scheduled,
    Settlement,
    SettleOutcome,
    Stored,
    Transferred,
)
from aiodelay.errors import AiodelayError, OutcomeUnknownError
from aiodelay.ports import Feed, LocalFeed, Pulse, Pulsing, Transferring, Work
from aiodelay.ports.carrier import Carrier
from aiodelay.ports.pulse import Step
from aiodelay.testing.forwarding import ForwardingFeed, ForwardingWork

from . import events as h

__all__ = ["RecordedCommands", "RecordedFeed", "RecordedLocalFeed", "RecordedTransfer", "RecordedWork", "scheduling"]


class RecordedCommands:
    """Carries commands out, and records them with the outcomes that their callers learn, also by `error.retry()`.

    Args:
        commands: The object that carries the commands out.
        history: The history to which commands are written.
    """

    def __init__(self, commands: Carrier, history: h.History) -> None:
        self._commands, self._history = commands, history

    async def carry_out(self, command: Command, size: int) -> Stored | Refused:
        """Carry out one command. If the caller is cancelled, its outcome stays unknown."""
        call = self._invoked(command)
        try:
            answer = await self._commands.carry_out(command, size)
        except AiodelayError as error:
            self._returned(call, error)
            raise
        self._returned(call, answer)
        return answer

    async def carry_out_many(
        self, commands: Sequence[Command], size: int
    ) -> Sequence[Stored | Refused | AiodelayError]:
        """Carry out a batch of commands."""
        calls = [self._invoked(command) for command in commands]
        try:
            answers = await self._commands.carry_out_many(commands, size)
        except AiodelayError as error:
            for call in calls:
                self._returned(call, error)
            raise
        for call, answer in zip(calls, answers, strict=True):
            self._returned(call, answer)
        return answers

    def _invoked(self, command: Command) -> int:
        call = self._history.next_call()
        if isinstance(command, Put):
            self._history.write(scheduling(call, command))
            return call
        at_ms = command.due.ms if isinstance(command, Reschedule) and isinstance(command.due, At) else None
        op: Literal["reschedule", "fire", "cancel"]
        op = "reschedule" if isinstance(command, Reschedule) else "fire" if isinstance(command, Fire) else "cancel"
        self._history.write(h.Invoked(call=call, op=op, id=command.id, at_ms=at_ms))
        return call

    def _returned(self, call: int, answer: Stored | Refused | AiodelayError) -> None:
        if isinstance(answer, OutcomeUnknownError):
            self._record_retry(call, answer)
            event = h.Returned(call=call, outcome="info")
        elif isinstance(answer, AiodelayError):
            event = h.Returned(call=call, outcome="fail", answer=type(answer).__name__)
        else:
            word = answer.answer if isinstance(answer, Stored) else answer.reason
            event = h.Returned(call=call, outcome="ok", answer=word, revision=answer.revision, due_ms=answer.due_ms)
        self._history.write(event)

    def _record_retry(self, call: int, error: OutcomeUnknownError) -> None:
        """Let `error.retry()` write the answer to the repeated command as one more answer to the call."""
        again = error._again  # noqa: SLF001 - the error has no other place for a repetition
        if again is None:
            return

        async def recorded() -> object:
            try:
                answer = await again()
            except OutcomeUnknownError as repeated:
                self._record_retry(call, repeated)
                raise
            event = h.Returned(call=call, outcome="ok", answer=str(answer))
            if isinstance(answer, Scheduled):
                event.answer, event.revision, event.due_ms = str(answer.outcome), answer.revision, answer.due_ms
            self._history.write(event)
            return answer

        error._again = recorded  # noqa: SLF001


def scheduling(call: int, put: Put) -> h.Invoked:
    """Return the event of a command that schedules a message."""
    envelope = put.envelope
    return h.Invoked(
        call=call,
        op="schedule",
        id=put.id,
        digest=h.digest_of(envelope.payload, envelope.key, envelope.headers),
        lane=envelope.lane,
        at_ms=put.due.ms if isinstance(put.due, At) else None,
        recurs=envelope.rule is not None,
        late_ms=put.late.after_ms if put.late.action is LateAction.DROP else None,
        joins=put.conflict.mode == "append",
    )


class RecordedFeed(ForwardingFeed):
    """A `Feed` whose claims, settlements and renewals are recorded.

    Args:
        work: The feed that gives out claims.
        history: The history to which calls are written.
        is_source: Whether the feed is that of a source, which puts retries and dead letters into the store.
    """

    def __init__(self, work: Feed, history: h.History, *, is_source: bool = False) -> None:
        super().__init__(work)
        self._history, self._is_source = history, is_source
        self._unanswered: dict[str, h.Claiming] = {}  # the last request, if its call has failed

    async def claim(self, demand: Mapping[Lane, Demand], *, request: str, lease_ms: int) -> Claimed:
        """Claim messages. The store may have claimed the messages of a repeated request at its first call."""
        asked = self._unanswered.get(request) or self._claiming(lease_ms)
        self._unanswered = {request: asked}
        claimed = await self._work.claim(demand, request=request, lease_ms=lease_ms)
        self._unanswered.clear()
        self._claimed(asked, claimed)
        return claimed

    def _claiming(self, lease_ms: int) -> h.Claiming:
        call = self._history.next_call()
        return self._history.stamp(h.Claiming(call=call, is_of_source=self._is_source, lease_ms=lease_ms))

    def _claimed(self, asked: h.Claiming, claimed: Claimed) -> None:
        if claimed.claims:
            self._history.write(asked)
            notes = [_claim_note(claim) for claim in claimed.claims]
            self._history.write(h.Claimed(call=asked.call, now_ms=claimed.now_ms, claims=notes))

    async def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        """Settle claims."""
        call = self._settling(settlements)
        outcomes = await self._work.settle(settlements)
        self._history.write(h.Settled(call=call, outcomes=list(outcomes)))
        return outcomes

    def _settling(self, settlements: Sequence[Settlement]) -> int:
        call = self._history.next_call()
        self._history.write(_settling(call, settlements))
        returned = [(each.id, each.revision) for each in settlements if isinstance(each, Again | Dead)]
        if self._is_source and returned:
            self._history.write(h.PuttingBack(batch=returned))
        return call

    async def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        """Renew leases."""
        call = self._history.next_call()
        self._history.write(_renewing(call, renewals))
        outcomes = await self._work.renew(renewals)
        self._history.write(h.Renewed(call=call, outcomes=list(outcomes)))
        return outcomes


class RecordedLocalFeed(RecordedFeed):
    """A `LocalFeed` whose claims, settlements and renewals are recorded."""

    def __init__(self, feed: LocalFeed, history: h.History) -> None:
        super().__init__(feed, history, is_source=True)
        self._local = feed

    def claim_nowait(self, demand: Mapping[Lane, Demand], *, lease_ms: int) -> Claimed:
        """Claim messages without a wait."""
        asked = self._claiming(lease_ms)
        claimed = self._local.claim_nowait(demand, lease_ms=lease_ms)
        self._claimed(asked, claimed)
        return claimed

    def settle_nowait(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome] | None:
        """Settle claims without a wait. If the feed has to wait, nothing is recorded: `settle` follows."""
        settling = self._history.stamp(_settling(self._history.next_call(), settlements))
        outcomes = self._local.settle_nowait(settlements)
        if outcomes is not None:
            self._history.write(settling)
            self._history.write(h.Settled(call=settling.call, outcomes=list(outcomes)))
        return outcomes


class RecordedWork(RecordedFeed, ForwardingWork):
    """A `Work` whose claims, settlements and renewals are recorded. The calls of its pulse are recorded too."""

    _work: Work

    def __init__(self, work: Work, history: h.History) -> None:
        super().__init__(work, history)
        pulse = work.pulse if isinstance(work, Pulsing) else None
        self.pulse: Pulse | None = None if pulse is None else _RecordedPulse(pulse, history)


class _RecordedPulse:
    """Records the calls that the thread of the pulse makes for a blocked event loop."""

    def __init__(self, pulse: Pulse, history: h.History) -> None:
        self._pulse, self._history = pulse, history

    @property
    def is_calling(self) -> bool:
        return self._pulse.is_calling

    def may_begin(self) -> bool:
        return self._pulse.may_begin()

    def step(self, tokens: Collection[int]) -> Step:
        return self._pulse.step(tokens)

    def renew(self, renewals: Sequence[Renewal]) -> Sequence[RenewOutcome]:
        call = self._history.next_call()
        self._history.write(_renewing(call, renewals))
        outcomes = self._pulse.renew(renewals)
        self._history.write(h.Renewed(call=call, outcomes=list(outcomes)))
        return outcomes

    def settle(self, settlements: Sequence[Settlement]) -> Sequence[SettleOutcome]:
        call = self._history.next_call()
        self._history.write(_settling(call, settlements))
        outcomes = self._pulse.settle(settlements)
        self._history.write(h.Settled(call=call, outcomes=list(outcomes)))
        return outcomes

    def wait(self, ms: int) -> None:
        self._pulse.wait(ms)

    def wake(self) -> None:
        self._pulse.wake()

    def restart(self) -> None:
        self._pulse.restart()

    def leave(self) -> None:
        self._pulse.leave()


class RecordedTransfer:
    """A `Transferring` whose moves are counted: a store does not name the messages that it moves."""

    def __init__(self, moves: Transferring, history: h.History, lane: Lane) -> None:
        self._moves, self._history, self._lane = moves, history, lane

    async def transfer(self, demand: Demand, settlements: Sequence[Settlement] = (), *, traces: int = 0) -> Transferred:
        """Move due messages."""
        transferred = await self._moves.transfer(demand, settlements, traces=traces)
        if transferred.moved:
            self._history.write(h.Moved(lane=self._lane, messages=transferred.moved))
        return transferred

    async def wait(self, *, until_ms: int | None) -> None:
        """Wait for messages."""
        await self._moves.wait(until_ms=until_ms)

    def wake(self) -> None:
        """End the current or next wait."""
        self._moves.wake()

    def clear(self) -> None:
        """Forget earlier wake-ups."""
        self._moves.clear()


def _settling(call: int, settlements: Sequence[Settlement]) -> h.Settling:
    return h.Settling(call=call, batch=[_settling_note(each) for each in settlements])


def _renewing(call: int, renewals: Sequence[Renewal]) -> h.Renewing:
    return h.Renewing(call=call, batch=[(each.id, each.token, each.to) for each in renewals])


def _claim_note(claim: Claim) -> h.ClaimNote:
    record = claim.record
    return h.ClaimNote(
        record.id,
        record.revision,
        record.due_ms,
        record.envelope.lane,
        record.attempt,
        claim.token,
        record.alone,
        record.lapses,
    )


def _settling_note(settlement: Settlement) -> h.SettlingNote:
    kind = "again" if isinstance(settlement, Again) else "dead" if isinstance(settlement, Dead) else settlement.outcome
    return h.SettlingNote(settlement.id, settlement.revision, settlement.token, kind, settlement.then_due_ms)
