"""The history checker: for each rule, a clean history and one that breaks only this rule."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Literal

import pytest

from aiodelay.core.transitions import token_for
from aiodelay.testing import history as h
from aiodelay.testing.history import RULES, Limits, Report, check
from aiodelay.testing.history.evidence import lines_of

ROOT = Path(__file__).parents[2]
EPOCH_MS = 1_900_000_000_000
LEASE_MS = 1_000
REVISION = EPOCH_MS


class Tale:
    """A history written by hand; `now` is in ms since its beginning, each step takes 1 ms unless it says otherwise."""

    def __init__(self) -> None:
        self.events: list[h.Event] = []
        self.now, self.epoch_ms = 0, EPOCH_MS
        self._calls = 0
        self.token = 0

    def tell(self, event: h.Event, *, by: str) -> None:
        event.process, event.at_ns, event.wall_ms = by, self.now * 1_000_000, self.epoch_ms + self.now
        self.events.append(event)
        self.now += 1

    def _call(self) -> int:
        self._calls += 1
        return self._calls

    def wait(self, until: int) -> Tale:
        assert until >= self.now
        self.now = until
        return self

    def put(
        self,
        id_: str = "a",
        *,
        due: int = 10,
        version: int = 0,
        outcome: Literal["ok", "fail", "info", "none"] = "ok",
        answer: str = "stored",
        by: str = "producer",
        recurs: bool = False,
        late_ms: int | None = None,
        joins: bool = False,
    ) -> Tale:
        call, digest = self._call(), f"{id_}{version}"
        invoked = h.Invoked(call=call, op="schedule", id=id_, digest=digest, lane="x")
        invoked.recurs, invoked.late_ms, invoked.joins = recurs, late_ms, joins
        self.tell(invoked, by=by)
        if outcome != "none":
            returned = h.Returned(call=call, outcome=outcome)
            if outcome == "ok":
                returned.answer, returned.revision, returned.due_ms = answer, REVISION + version, EPOCH_MS + due
            self.tell(returned, by=by)
        return self

    def answer_put(self, call: int) -> Tale:
        """Answer a call that put `a` without a certain answer."""
        returned = h.Returned(call=call, outcome="ok", answer="stored", revision=REVISION, due_ms=EPOCH_MS + 10)
        self.tell(returned, by="producer")
        return self

    def command(self, op: Literal["cancel", "reschedule"], answer: str, *, at: int | None = None) -> Tale:
        call = self._call()
        at_ms = None if at is None else EPOCH_MS + at
        self.tell(h.Invoked(call=call, op=op, id="a", at_ms=at_ms), by="producer")
        self.tell(h.Returned(call=call, outcome="ok", answer=answer), by="producer")
        return self

    def redrive(self, version: int = 0) -> Tale:
        """Redrive a version as the next one."""
        call, revision = self._call(), REVISION + version
        self.tell(h.Invoked(call=call, op="redrive", id="a", revision=revision), by="producer")
        self.tell(h.Returned(call=call, outcome="ok", answer="stored", revision=revision + 1), by="producer")
        return self

    def purge(self, answer: str) -> Tale:
        call = self._call()
        self.tell(h.Invoked(call=call, op="purge", id="a", revision=REVISION), by="producer")
        if answer:
            self.tell(h.Returned(call=call, outcome="ok", answer=answer), by="producer")
        return self

    def step(self, by_ms: int) -> Tale:
        """Step all clocks, but not the order of the events."""
        self.epoch_ms += by_ms
        return self

    def moved(self) -> Tale:
        self.tell(h.Moved(lane="x", messages=1), by="p")
        return self

    def claim(
        self,
        *ids: str,
        version: int = 0,
        due: int = 10,
        by: str = "p",
        attempt: int = 0,
        token: int | None = None,
        lapses: int = 0,
        is_of_source: bool = False,
        lease_ms: int = 0,
        stepped_by: int = 0,
    ) -> Tale:
        """Claim `a`, or these; of several, each is due 1 ms earlier than the one before."""
        call = self._call()
        self.tell(h.Claiming(call=call, is_of_source=is_of_source, lease_ms=lease_ms), by=by)
        self.token = token_for(self.epoch_ms + self.now + LEASE_MS, 0) if token is None else token
        notes = [
            h.ClaimNote(id_, REVISION + version, EPOCH_MS + due - i, "x", attempt, self.token, lapses=lapses)
            for i, id_ in enumerate(ids or ("a",))
        ]
        now_ms = self.epoch_ms + self.now + stepped_by
        self.tell(h.Claimed(call=call, now_ms=now_ms, claims=notes), by=by)
        return self

    def run(
        self,
        id_: str = "a",
        *,
        version: int = 0,
        due: int = 10,
        by: str = "p",
        attempt: int = 1,
        digest: str = "",
        token: int = 0,
        result: Literal["ok", "failed", "cancelled", ""] = "ok",
    ) -> Tale:
        delivery = f"{id_}/{REVISION + version}/{EPOCH_MS + due}"
        digest = digest or f"{id_}{version}"
        started = h.RunStarted(id=id_, delivery_id=delivery, attempt=attempt, lane="x", digest=digest, token=token)
        self.tell(started, by=by)
        if result:
            self.tell(h.RunEnded(delivery_id=delivery, attempt=attempt, token=token, result=result), by=by)
        return self

    def end_run(self, token: int = 0) -> Tale:
        """End the oldest run of `a` that goes on, of the claim with this token."""
        delivery = f"a/{REVISION}/{EPOCH_MS + 10}"
        self.tell(h.RunEnded(delivery_id=delivery, attempt=1, token=token, result="ok"), by="p")
        return self

    def settle(
        self,
        id_: str = "a",
        *,
        version: int = 0,
        kind: Literal["delivered", "dropped", "again", "dead"] = "delivered",
        outcome: str = "settled",
        by: str = "p",
        token: int | None = None,
        then: int | None = None,
    ) -> Tale:
        call = self._call()
        next_ms = None if then is None else EPOCH_MS + then
        note = h.SettlingNote(id_, REVISION + version, self.token if token is None else token, kind, next_ms)
        self.tell(h.Settling(call=call, batch=[note]), by=by)
        if outcome:
            self.tell(h.Settled(call=call, outcomes=[outcome]), by=by)
        return self

    def renew(self, outcome: str, *, token: int | None = None, by: str = "p") -> Tale:
        """Renew the lease of `a`. The latest token becomes the new one, unless the renewal is of an earlier claim."""
        call, former = self._call(), self.token if token is None else token
        to = token_for(self.epoch_ms + self.now + LEASE_MS, 0)
        self.tell(h.Renewing(call=call, batch=[("a", former, to)]), by=by)
        self.tell(h.Renewed(call=call, outcomes=[outcome]), by=by)
        self.token = to if token is None else self.token
        return self

    def process(
        self, what: Literal["ready", "opened", "closed", "killed", "stopped", "ended"], *, by: str = "p", code: int = 0
    ) -> Tale:
        self.tell(h.Process(what=what, code=code), by=by)
        return self

    def put_back(self, *, by: str = "p") -> Tale:
        self.tell(h.PuttingBack(batch=[("a", REVISION)]), by=by)
        return self

    def resources(self, phase: Literal["baseline", "end"], tasks: int) -> Tale:
        self.tell(h.Resources(phase=phase, tasks=tasks, threads=3, files=9), by="p")
        return self

    def loss(self, since: int, *, commands: bool) -> Tale:
        self.tell(h.Loss(since_ns=since * 1_000_000, commands=commands), by="supervisor")
        return self

    def final(self, *pending: h.PendingNote, dead: tuple[str, ...] = (), leases: int = 0) -> Tale:
        letters = [(each, REVISION, "killed_worker") for each in dead]
        final = h.Final(now_ms=EPOCH_MS + self.now, pending=list(pending), dead=letters, leases=leases)
        self.tell(final, by="judge")
        return self

    def report(self, limits: Limits | None = None) -> Report:
        return check(self.events, limits)


def delivered(id_: str = "a") -> Tale:
    return Tale().put(id_).wait(10).claim(id_).run(id_).settle(id_)


def pending(id_: str = "a", *, version: int = 0, state: str = "scheduled", due: int = 10) -> h.PendingNote:
    return h.PendingNote(id_, REVISION + version, state, EPOCH_MS + due)


def taken_over(*, at: int) -> Tale:
    """Process p dies with a message, q takes it over."""
    story = Tale().process("ready").process("ready", by="q").put().wait(10).claim().run(result="")
    story.process("killed").process("ended", code=-9)
    return story.wait(at).claim(by="q").run(by="q").settle(by="q").final()


def killed_late() -> Tale:
    """Whoever kills p stands still between the note and the kill. Meanwhile p claims a message and runs it."""
    story = Tale().put().process("killed").wait(20).claim().run(result="")
    story.process("ended", code=-9)
    return story.claim(by="q").run(by="q").settle(by="q").final()


def killed_then_failed() -> Tale:
    """Process p dies with a message; q takes it over, fails, and tries again: one run again, for one in flight."""
    story = Tale().process("ready").process("ready", by="q").put().wait(10).claim().run(result="")
    story.process("killed").process("ended", code=-9).wait(1_100)
    story.claim(by="q").run(by="q", result="failed").settle(by="q", kind="again")
    return story.claim(by="q", attempt=1).run(by="q", attempt=2).settle(by="q").final()


def runs_twice_at_once() -> Tale:
    """Process p claims a message, its lease ends at once since the clock has stepped, and p claims it again."""
    story = Tale().put().wait(10).claim().run(result="")
    first = story.token
    story.wait(1_100).claim().run(result="").end_run().settle(outcome="gone", token=first)
    return story.end_run().settle().final()


def claims_twice() -> tuple[Tale, int, int]:
    """Process p claims a message, its lease ends, and p claims it again. Return the tokens too."""
    story = Tale().put().wait(10).claim()
    first = story.token
    story.wait(1_100).claim(lapses=1)
    return story, first, story.token


def later_claim_ends_first() -> Tale:
    story, first, second = claims_twice()
    story.run(result="", token=first).run(result="", token=second)
    return story.end_run(second).settle(token=second).end_run(first).settle(outcome="gone", token=first).final()


def earlier_claim_runs_last() -> Tale:
    story, first, second = claims_twice()
    return story.run(token=second).settle(token=second).run(token=first).settle(outcome="gone", token=first).final()


def settles_for_the_run_of_another_claim() -> Tale:
    story, first, second = claims_twice()
    return story.run(token=first).settle(token=second).final()


def joined_in_flight() -> Tale:
    """An item joins a message in flight, and is delivered after it with a revision that no command was answered."""
    story = Tale().put(joins=True).wait(10).claim().run(result="").put(joins=True, answer="replaced").end_run()
    return story.settle().claim(version=1).run(version=1, digest="joined").settle(version=1).final()


def joined_and_failed() -> Tale:
    """An item joins a message in flight, whose attempt fails. The next attempt has both items, as a new revision."""
    story = Tale().put(joins=True).wait(10).claim().put(joins=True, due=5_000, answer="replaced")
    story.run(result="failed")
    story.settle(kind="again").claim(version=1, attempt=1).run(version=1, attempt=2, digest="joined")
    return story.settle(version=1)


def zombie_settles() -> Tale:
    """Process p settles although q has taken over."""
    story = Tale().put().wait(10).claim().run()
    token = story.token
    return story.wait(1_100).claim(by="q").settle(token=token).final(pending())


def unwanted(answer: str, *, begins_after: int, is_stopped: bool = False) -> Tale:
    """A process learns from a renewal that its claim is replaced or cancelled, and begins the run after a while."""
    story = Tale().put().wait(10).claim()
    if answer == "superseded":
        story.put(version=1, answer="replaced")
    else:
        story.command("cancel", "in_flight")
    story.renew(answer)
    if is_stopped:
        story.process("stopped")
    story.wait(story.now + begins_after).run().settle(outcome=answer)
    if answer == "superseded":
        story.claim(version=1).run(version=1).settle(version=1)
    return story.final()


def claimed_before_it_was_replaced(*, by_answer: bool) -> Tale:
    """A version is put without an answer and delivered. Then the version before it is claimed, or settled."""
    story = Tale().put().put(version=1, outcome="info").wait(10)
    if by_answer:
        story.claim()
        first = story.token
        story.claim(version=1).run(version=1).settle(version=1)
        return story.run().settle(token=first).final()
    return story.claim(version=1).run(version=1).settle(version=1).claim().run().settle().final()


def zombie_renews() -> Tale:
    """Process p renews its lease although q has taken over."""
    story = Tale().put().wait(10).claim().run(result="")
    token = story.token
    story.wait(1_100).claim(by="q").renew("renewed", token=token)
    return story.run(by="q").settle(by="q").final()


def settled_twice(*, since: int) -> Tale:
    """Its first settlement was lost with a server that was behind since then, or was not."""
    story = delivered().loss(since, commands=False).wait(500)
    return story.claim(by="q").run(by="q").settle(by="q").final()


def fired_and_not_found(*, is_server_lost: bool) -> Tale:
    """A message is delivered before its due time, while it is fired. The answer is that there is no such message.

    This is right if the server that fired the message was lost, so that the command was sent again to another server.
    """
    story = Tale().put(due=90).loss(2, commands=False).wait(20)
    story.tell(h.Invoked(call=9, op="fire", id="a"), by="producer")
    story.claim(due=20).run(due=90).settle()
    if is_server_lost:
        story.loss(20, commands=False)
    story.tell(h.Returned(call=9, outcome="ok", answer="not_found"), by="producer")
    return story.final()


def put_back(*, answer: str) -> Tale:
    """Process p puts back what failed, and is killed; q runs it once from the store and once from its source."""
    story = Tale().put().wait(10).claim().run(result="failed").put_back().settle(kind="again", outcome=answer)
    story.process("killed").process("ended", code=-9).wait(100)
    story.claim(by="q", attempt=1).run(by="q", attempt=2).settle(by="q").wait(1_100)
    return story.claim(by="q").run(by="q").settle(by="q").final()


def claim_heard_of_late() -> Tale:
    """Process q, blocked meanwhile, hears of its claim when its lease is over and p has delivered the message."""
    story = Tale().put().wait(10)
    call, now = story._call(), EPOCH_MS + story.now
    story.tell(h.Claiming(call=call), by="q")
    note = h.ClaimNote("a", REVISION, EPOCH_MS + 10, "x", 0, token_for(now + LEASE_MS, 0))
    story.wait(1_100).claim().run().settle()
    story.tell(h.Claimed(call=call, now_ms=now, claims=[note]), by="q")
    return story.settle(by="q", kind="again", outcome="gone", token=note.token).final()


def given_back_before_it_was_claimed(*, is_of_source: bool) -> Tale:
    """The request of process q is under way while p claims the message and gives it back."""
    story = Tale().put().wait(10)
    call, asked = story._call(), EPOCH_MS + story.now
    story.tell(h.Claiming(call=call, is_of_source=is_of_source), by="q")
    story.claim().settle(kind="again")
    note = h.ClaimNote("a", REVISION, EPOCH_MS + 10, "x", 0, token_for(asked + LEASE_MS, 0))
    story.token = note.token
    story.tell(h.Claimed(call=call, now_ms=EPOCH_MS + story.now, claims=[note]), by="q")
    return story.run(by="q").settle(by="q").final()


RETRIED = f"a~{EPOCH_MS + 10}"
"""The id of the first occurrence of the series `a`, once it is retried."""


def series(*, retry: bool = False) -> Tale:
    """The first occurrence of a series is delivered; or it fails, and is to be tried again as a message of its own."""
    story = Tale().put(recurs=True).wait(10).claim().run(result="failed" if retry else "ok")
    return story.settle(kind="again" if retry else "delivered", then=60)


def redriven(kind: Literal["delivered", "dead"] = "delivered") -> Tale:
    """A dead letter is redriven, as a new revision with the same bytes."""
    story = Tale().put().wait(10).claim().run(result="failed").settle(kind="dead").redrive()
    result: Literal["ok", "failed"] = "ok" if kind == "delivered" else "failed"
    return story.claim(version=1).run(version=1, digest="a0", result=result).settle(version=1, kind=kind)


def one_claim_out_of_order(*, is_of_source: bool) -> Tale:
    """One claim gives out message a before b, which is due earlier."""
    story = Tale().put("a").put("b", due=9).wait(10).claim("a", "b", is_of_source=is_of_source)
    return story.run("a").settle("a").run("b", due=9).settle("b").final()


def two_claims(*, due: int, asked_late: bool = False, is_of_source: bool = False) -> Tale:
    """Message b is claimed after a. It is stored first, unless it is asked late."""
    story = Tale()
    if not asked_late:
        story.put("b", due=due)
    story.put().wait(20)
    story.claim(is_of_source=is_of_source)
    if asked_late:
        story.put("b", due=due)
    story.run().settle().claim("b", due=due, is_of_source=is_of_source)
    return story.run("b", due=due).settle("b").final()


def overlapping_claims() -> Tale:
    """Process q has asked first, and is answered last: the store may have given it the first message."""
    story = Tale().put("b", due=9).put().wait(20)
    call = story._call()
    story.tell(h.Claiming(call=call), by="q")
    story.claim().run().settle()
    note = h.ClaimNote("b", REVISION, EPOCH_MS + 9, "x", 0, token_for(EPOCH_MS + story.now + LEASE_MS, 0))
    story.tell(h.Claimed(call=call, now_ms=EPOCH_MS + story.now, claims=[note]), by="q")
    return story.run("b", due=9, by="q").settle("b", by="q", token=note.token).final()


def stored_at_the_same_time() -> Tale:
    """Messages a and b are due at once, and stored by overlapping commands. One claim returns b first."""
    story = Tale().put(outcome="none").put("b").answer_put(1)
    return ended(claimed_together(story))


def occurrence_due_during_a_run() -> Tale:
    """The next occurrence of a series was due while the one before ran. It comes after a message that is due later."""
    story = Tale().put(recurs=True).put("b", due=65).wait(10).claim()
    first = story.token
    story.run(result="").wait(66).claim("b", due=65, by="q").run("b", due=65, by="q").settle("b", by="q")
    story.end_run().settle(token=first, then=60)
    return story.claim(due=60).run(due=60).settle().final()


def given_out_by_a_lost_server() -> Tale:
    """A server is lost that had replaced and delivered a message. Its successor delivers the version before."""
    story = Tale().put()
    since = story.now
    story.put(version=1, answer="replaced").wait(10).claim(version=1).run(version=1).settle(version=1)
    return story.loss(since, commands=True).claim().run().settle().final()


def ended(story: Tale) -> Tale:
    """Messages a and b, which are claimed, are delivered."""
    return story.run("b").settle("b").run().settle().final()


def one_claim_of_two(*, first_answered: bool) -> Tale:
    """Messages a and b are due at once. One claim returns b first, although a was scheduled first, or perhaps was."""
    return claimed_together(Tale().put(outcome="ok" if first_answered else "info").put("b"))


def claimed_together(story: Tale) -> Tale:
    """One claim returns b, then a."""
    story.wait(10)
    call, token = story._call(), token_for(EPOCH_MS + 1_000, 0)
    story.tell(h.Claiming(call=call), by="p")
    notes = [h.ClaimNote(each, REVISION, EPOCH_MS + 10, "x", 0, token) for each in ("b", "a")]
    story.tell(h.Claimed(call=call, now_ms=EPOCH_MS + story.now, claims=notes), by="p")
    story.token = token
    return story


def first_settlement_lost() -> Tale:
    """One claim returns two messages. The server that took the settlement of the first one is lost."""
    story = one_claim_of_two(first_answered=False).run("b")
    since = story.now
    return story.settle("b").loss(since, commands=False).run().settle().final()


def element_of_a_list() -> Tale:
    """A message is in a list when another message of its id is scheduled and cancelled. It is still delivered."""
    story = Tale().put().put(version=1).command("cancel", "cancelled").wait(10)
    story.claim(is_of_source=True).run().settle().claim(version=1, is_of_source=True)
    return story.run(version=1).settle(version=1).final()


def left_by_a_series() -> Tale:
    """A series ends while an occurrence waits for its retry. A new message of the same id does not end the retry."""
    story = series(retry=True).wait(60).claim(due=60).run(due=60).settle().put(version=1, due=80)
    story.claim(RETRIED, attempt=1).run(attempt=2).settle(RETRIED)
    return story.wait(80).claim(version=1, due=80).run(version=1, due=80).settle(version=1).final()


def left_by(*ends: Literal["closed"], at: int = 100) -> Tale:
    """Process p opens a scheduler and leaves a message in flight; q claims it."""
    story = Tale().process("opened").process("opened", by="q").put().wait(10).claim().run(result="")
    for what in ends:
        story.process(what)
    story.wait(at).claim(by="q").run(by="q").settle(by="q")
    return story.process("closed", by="q").final()


CLEAN: dict[str, Callable[[], Tale]] = {
    "fired by a server that was lost": lambda: fired_and_not_found(is_server_lost=True),
    "settled, and the settlement lost with its server": lambda: settled_twice(since=13),
    "stored, and lost with its server": lambda: Tale().put(due=90_000).loss(0, commands=True).final(),
    "claimed by one who heard of it late": claim_heard_of_late,
    "given back before a source gave it out": lambda: given_back_before_it_was_claimed(is_of_source=True),
    "delivered": lambda: delivered().final(),
    "still pending": lambda: Tale().put(due=90_000).final(pending()),
    "refused, never stored": lambda: Tale().put(outcome="fail").final(),
    "unknown, and not stored": lambda: Tale().put(outcome="info").final(),
    "unknown, and delivered": lambda: Tale().put(outcome="info").wait(10).claim().run().settle().final(),
    "its producer died while asking": lambda: (
        Tale().put(outcome="none").process("ended", by="producer", code=-9).wait(10).claim().run().settle().final()
    ),
    "cancelled": lambda: Tale().put().command("cancel", "cancelled").final(),
    "cancelled in flight: this run goes on": lambda: (
        Tale().put().wait(10).claim().command("cancel", "in_flight").run().settle().final()
    ),
    "replaced": lambda: (
        Tale()
        .put()
        .put(version=1, answer="replaced")
        .wait(20)
        .claim(version=1)
        .run(version=1)
        .settle(version=1)
        .final()
    ),
    "replaced in flight: both are run": lambda: (
        Tale()
        .put()
        .wait(10)
        .claim()
        .put(version=1, answer="replaced")
        .run()
        .settle(outcome="superseded")
        .claim(version=1)
        .run(version=1)
        .settle(version=1)
        .final()
    ),
    "may have been replaced by one that is unknown": lambda: Tale().put().put(version=1, outcome="info").final(),
    "a dead letter that was purged": lambda: (
        Tale().put().wait(10).claim().run(result="failed").settle(kind="dead").purge("purged").final()
    ),
    "a dead letter that may have been purged": lambda: (
        Tale().put().wait(10).claim().run(result="failed").settle(kind="dead").purge("").final()
    ),
    "joined in flight, and delivered by the next attempt": lambda: joined_and_failed().final(),
    "joined in flight, and waiting for the next attempt": lambda: (
        Tale()
        .put(joins=True)
        .wait(10)
        .claim()
        .put(joins=True, answer="replaced")
        .run(result="failed")
        .settle(kind="again")
        .final(pending(version=1))
    ),
    "the clock stepped back while a run failed": lambda: (
        Tale()
        .put()
        .wait(600)
        .claim()
        .run(result="failed")
        .step(-500)
        .settle(kind="again")
        .claim(attempt=1)
        .run(attempt=2)
        .settle()
        .final()
    ),
    "the clock stepped back between a claim and its run": lambda: (
        Tale().put().wait(10).claim().step(-50).run().settle().final()
    ),
    "stored after a claim of a message that is due later": lambda: two_claims(due=9, asked_late=True),
    "due at once, and perhaps scheduled first": lambda: ended(one_claim_of_two(first_answered=False)),
    "a source whose time the process estimates": lambda: (
        Tale().put().wait(10).claim(is_of_source=True, stepped_by=-3).run().settle().final()
    ),
    "elements of a list, which are not in the order of due times": lambda: two_claims(due=9, is_of_source=True),
    "records of a topic, which are not in the order of their times": lambda: one_claim_out_of_order(is_of_source=True),
    "out of order by two claims at the same time": overlapping_claims,
    "due at once, and scheduled at the same time": stored_at_the_same_time,
    "an occurrence that was due while the one before it ran": occurrence_due_during_a_run,
    "an earlier version after its replacement was lost with a server": given_out_by_a_lost_server,
    "two messages of one claim, whose first settlement was lost with its server": first_settlement_lost,
    "begun by a process that was stopped after it had learned of the replacement": lambda: unwanted(
        "superseded", begins_after=600, is_stopped=True
    ),
    "the clock stepped back before the repetition of a claim was answered": lambda: (
        Tale().put().wait(10).claim(lease_ms=LEASE_MS, stepped_by=-500).run().settle().final()
    ),
    "begun while the answer that it was replaced arrived": lambda: unwanted("superseded", begins_after=0),
    "begun while the answer that it was cancelled arrived": lambda: unwanted("cancelled", begins_after=0),
    "an element of a list whose id was scheduled again": element_of_a_list,
    "a retry that an ended series has left": left_by_a_series,
    "dropped by its process because it is late": lambda: (
        Tale().put(late_ms=5).wait(20).claim().settle(kind="dropped").final()
    ),
    "redriven, and dropped because it is late": lambda: (
        Tale().put(late_ms=5).wait(10).claim().run(result="failed").settle(kind="dead").redrive().wait(100).final()
    ),
    "redriven twice": lambda: (
        redriven(kind="dead").redrive(1).claim(version=2).run(version=2, digest="a0").settle(version=2).final()
    ),
    "kept": lambda: delivered().put(answer="kept").final(),
    "failed, then delivered": lambda: (
        Tale()
        .put()
        .wait(10)
        .claim()
        .run(result="failed")
        .settle(kind="again")
        .claim(attempt=1)
        .run(attempt=2)
        .settle()
        .final()
    ),
    "claimed between the note of a kill and the kill": killed_late,
    "put back, and its process killed before the source heard of it": lambda: put_back(answer=""),
    "given up": lambda: Tale().put().wait(10).claim().run(result="failed").settle(kind="dead").final(dead=("a",)),
    "run again after a kill": lambda: taken_over(at=1_100),
    "run again after a kill, and once more since it failed": killed_then_failed,
    "run again after its lease ended": lambda: (
        Tale().put().wait(10).claim().run(result="").wait(1_100).claim(by="q").run(by="q").settle(by="q").final()
    ),
    "run twice at once by one process": runs_twice_at_once,
    "in another order after their leases ended": lambda: (
        Tale()
        .put("a")
        .put("b", due=9)
        .wait(1_100)
        .claim("a", "b", lapses=1)
        .run("a")
        .settle("a")
        .run("b", due=9)
        .settle("b")
        .final()
    ),
    "run late by the one who was stopped": lambda: (
        Tale()
        .put()
        .wait(10)
        .claim()
        .process("stopped")
        .wait(1_100)
        .claim(by="q")
        .run(by="q")
        .settle(by="q")
        .run()
        .settle(outcome="gone", token=1)
        .final()
    ),
    "a series goes on": lambda: series().final(pending(due=60)),
    "a series has ended": lambda: series().wait(60).claim(due=60).run(due=60).settle().final(),
    "an occurrence is tried again": lambda: (
        series(retry=True).claim(RETRIED, attempt=1).run(attempt=2).settle(RETRIED).final(pending())
    ),
    "an occurrence waits for its retry": lambda: series(retry=True).final(pending(), pending(RETRIED)),
    "a series was rescheduled while an occurrence waited for its retry": lambda: (
        series(retry=True)
        .command("reschedule", "rescheduled", at=90)
        .claim(RETRIED, attempt=1)
        .run(attempt=2)
        .settle(RETRIED)
        .final(pending())
    ),
    "dropped because it is late": lambda: Tale().put(late_ms=5).wait(100).final(),
    "joined": lambda: (
        Tale().put().put(joins=True, answer="replaced").wait(10).claim().run(digest="both").settle().final()
    ),
    "redriven": lambda: redriven().final(),
    "moved by the store itself": lambda: Tale().put().wait(10).moved().final(),
    "run again after its process has vanished": left_by,
    "put off by its handler, and claimed again behind a message that is due later": lambda: (
        Tale()
        .put("a", due=9)
        .put("b")
        .wait(10)
        .claim("a", due=9)
        .run("a", due=9, result="failed")
        .settle("a", kind="again")
        .claim("b", "a")
        .run("b")
        .settle("b")
        .run("a", due=9)
        .settle("a")
        .final()
    ),
    "rescheduled": lambda: (
        Tale().put().command("reschedule", "rescheduled", at=50).wait(50).claim(due=50).run(due=50).settle().final()
    ),
    "two runs of one attempt at once, the later claim's ends first": later_claim_ends_first,
    "a run of an earlier claim": earlier_claim_runs_last,
    "an item that joined a message in flight": joined_in_flight,
}

GUILTY: dict[str, tuple[str, Callable[[], Tale], Limits]] = {
    "S1 before its due time": (
        "S1",
        lambda: Tale().put(due=100).wait(10).claim(due=100).run(due=100).settle().final(),
        Limits(),
    ),
    "S1 at the time from before it was rescheduled": (
        "S1",
        lambda: Tale().put().command("reschedule", "rescheduled", at=90).wait(20).claim().run().settle().final(),
        Limits(),
    ),
    "S1 at a time that the record has and nobody gave": (
        "S1",
        lambda: Tale().put(due=100).wait(20).claim(due=10).run(due=10).settle().final(),
        Limits(),
    ),
    "S1 by the store's clock, while the clock of the process is ahead": (
        "S1",
        lambda: Tale().put(due=5_000).wait(10).claim(due=5_000).step(6_000).run(due=5_000).settle().final(),
        Limits(),
    ),
    "S2 an item that joined a message in flight is gone": (
        "S2",
        lambda: Tale().put(joins=True).wait(10).claim().put(joins=True, answer="replaced").run().settle().final(),
        Limits(),
    ),
    "S2 a dead letter is gone, and another one was not found to be purged": (
        "S2",
        lambda: Tale().put().wait(10).claim().run(result="failed").settle(kind="dead").purge("not_found").final(),
        Limits(),
    ),
    "S2 acknowledged by a repetition, and gone": (
        "S2",
        lambda: Tale().put(outcome="info").answer_put(1).final(),
        Limits(),
    ),
    "S2 acknowledged and gone": ("S2", lambda: Tale().put().final(), Limits()),
    "S2 the later version is gone": (
        "S2",
        lambda: Tale().put().wait(10).claim().put(version=1, answer="replaced").run().settle(outcome="gone").final(),
        Limits(),
    ),
    "S2 an earlier unknown put is no excuse": (
        "S2",
        lambda: Tale().put(outcome="none", by="x").process("ended", by="x", code=-9).put(version=1).final(),
        Limits(),
    ),
    "S2 a series is gone": ("S2", lambda: series().final(), Limits()),
    "S2 an occurrence that was to be tried again is gone": (
        "S2",
        lambda: series(retry=True).final(pending(due=60)),
        Limits(),
    ),
    "S2 a message that was not late yet is gone": ("S2", lambda: Tale().put(late_ms=500).wait(100).final(), Limits()),
    "S2 a redriven message is gone": (
        "S2",
        lambda: Tale().put().wait(10).claim().run(result="failed").settle(kind="dead").redrive().final(),
        Limits(),
    ),
    "S2 dropped without a policy": (
        "S2",
        lambda: Tale().put().wait(10).claim().settle(kind="dropped").final(),
        Limits(),
    ),
    "S2 dropped before it was late": (
        "S2",
        lambda: Tale().put(late_ms=500).wait(20).claim().settle(kind="dropped").final(),
        Limits(),
    ),
    "S8 the bytes of another version after a redrive": (
        "S8",
        lambda: (
            Tale()
            .put()
            .put(version=1, answer="replaced")
            .wait(10)
            .claim(version=1)
            .run(version=1, result="failed")
            .settle(version=1, kind="dead")
            .redrive(1)
            .claim(version=2)
            .run(version=2, digest="a0")
            .settle(version=2)
            .final()
        ),
        Limits(),
    ),
    "S8 other bytes after a redrive": (
        "S8",
        lambda: (
            Tale()
            .put()
            .wait(10)
            .claim()
            .run(result="failed")
            .settle(kind="dead")
            .redrive()
            .claim(version=1)
            .run(version=1, digest="?")
            .settle(version=1)
            .final()
        ),
        Limits(),
    ),
    "B1 again although its scheduler was closed": ("B1", lambda: left_by("closed", at=1_100), Limits(lapses=False)),
    "B2 too many are late": ("B2", lambda: delivered().final(), Limits(p99_ms=1)),
    "S2 a refused cancel is no excuse": ("S2", lambda: Tale().put().command("cancel", "not_found").final(), Limits()),
    "S3 settled before it was run": ("S3", lambda: Tale().put().wait(10).claim().settle().run().final(), Limits()),
    "S3 settled as delivered after it failed": (
        "S3",
        lambda: Tale().put().wait(10).claim().run(result="failed").settle().final(),
        Limits(),
    ),
    "S3 settled after a run of another claim": ("S3", settles_for_the_run_of_another_claim, Limits()),
    "S4 the version that was replaced": (
        "S4",
        lambda: (
            Tale().put().put(version=1, answer="replaced").wait(10).claim().run().settle().final(pending(version=1))
        ),
        Limits(),
    ),
    "S4 an earlier version after a version with an unknown outcome": (
        "S4",
        lambda: claimed_before_it_was_replaced(by_answer=False),
        Limits(),
    ),
    "S4 the outcome of an earlier version was written after a version with an unknown outcome": (
        "S4",
        lambda: claimed_before_it_was_replaced(by_answer=True),
        Limits(),
    ),
    "S4 the outcome of a replaced version was written": (
        "S4",
        lambda: (
            Tale()
            .put()
            .wait(10)
            .claim()
            .put(version=1, answer="replaced")
            .run()
            .settle()
            .claim(version=1)
            .run(version=1)
            .settle(version=1)
            .final()
        ),
        Limits(),
    ),
    "S4 begun although its process knew of the replacement": (
        "S4",
        lambda: unwanted("superseded", begins_after=600),
        Limits(),
    ),
    "S5 begun although its process knew of the cancel": (
        "S5",
        lambda: unwanted("cancelled", begins_after=600),
        Limits(),
    ),
    "S5 cancelled and run, although the answer to its put was lost": (
        "S5",
        lambda: (
            Tale()
            .put(outcome="info")
            .wait(10)
            .claim()
            .run(result="failed")
            .settle(kind="again")
            .command("cancel", "cancelled")
            .claim(attempt=1)
            .run(attempt=2)
            .settle()
            .final()
        ),
        Limits(),
    ),
    "S5 cancelled, and run": (
        "S5",
        lambda: Tale().put().command("cancel", "cancelled").wait(10).claim().run().settle().final(),
        Limits(),
    ),
    "S5 cancelled in flight, and retried": (
        "S5",
        lambda: (
            Tale()
            .put()
            .wait(10)
            .claim()
            .command("cancel", "in_flight")
            .run(result="failed")
            .settle(kind="again")
            .claim(attempt=1)
            .run(attempt=2)
            .settle()
            .final()
        ),
        Limits(),
    ),
    "S6 claimed after it was settled": (
        "S6",
        lambda: delivered().wait(5_000).claim(by="q").settle("b").final(),
        Limits(),
    ),
    "S6 delivered, rescheduled, and claimed with the new due time": (
        "S6",
        lambda: (
            delivered()
            .command("reschedule", "rescheduled", at=5_000)
            .wait(5_000)
            .claim(due=5_000, by="q")
            .settle(by="q", kind="again")
            .final()
        ),
        Limits(),
    ),
    "S7 two owners": (
        "S7",
        lambda: Tale().put().wait(10).claim().claim(by="q").run(by="q").settle(by="q").final(),
        Limits(),
    ),
    "S7 a store's claim with an earlier token lasts while another is given out": (
        "S7",
        lambda: given_back_before_it_was_claimed(is_of_source=False),
        Limits(),
    ),
    "S7 an old owner's settlement was accepted": (
        "S7",
        zombie_settles,
        Limits(),
    ),
    "S7 an old owner's renewal was accepted": ("S7", zombie_renews, Limits()),
    "S7 tokens that do not grow": (
        "S7",
        lambda: Tale().put().wait(10).claim().wait(1_100).claim(by="q", token=1).run(by="q").settle(by="q").final(),
        Limits(),
    ),
    "S8 other bytes": ("S8", lambda: Tale().put().wait(10).claim().run(digest="?").settle().final(), Limits()),
    "S8 what nobody scheduled": ("S8", lambda: Tale().wait(10).claim("b").run("b").settle("b").final(), Limits()),
    "S9 out of order": ("S9", lambda: one_claim_out_of_order(is_of_source=False), Limits()),
    "S9 out of order between two claims": ("S9", lambda: two_claims(due=9), Limits(in_order={"x"})),
    "S9 due at once, and scheduled later": (
        "S9",
        lambda: ended(one_claim_of_two(first_answered=True)),
        Limits(in_order={"x"}),
    ),
    "S9 due at once, and scheduled later, between two claims": (
        "S9",
        lambda: two_claims(due=10),
        Limits(in_order={"x"}),
    ),
    "B1 twice by one claim": ("B1", lambda: Tale().put().wait(10).claim().run().run().settle().final(), Limits()),
    "B1 again after a success was settled as a failure, later than the lease": (
        "B1",
        lambda: (
            Tale()
            .put()
            .wait(10)
            .claim()
            .run()
            .settle(kind="again")
            .wait(1_200)
            .claim(attempt=1)
            .run(attempt=2)
            .settle()
            .final()
        ),
        Limits(),
    ),
    "B1 again after an orderly end": (
        "B1",
        lambda: (
            Tale()
            .put()
            .wait(10)
            .claim()
            .run()
            .process("ended")
            .wait(1_100)
            .claim(by="q")
            .run(by="q")
            .settle(by="q")
            .final()
        ),
        Limits(lapses=False),
    ),
    "S2 lost with a server although replicated": (
        "S2",
        lambda: Tale().put(due=90_000).loss(0, commands=False).final(),
        Limits(),
    ),
    "L1 leased in the end": ("L1", lambda: Tale().put().final(pending(state="in_flight")), Limits()),
    "L1 a lease without a message": ("L1", lambda: delivered().final(leases=1), Limits()),
    "L1 taken over much too late": ("L1", lambda: taken_over(at=9_000), Limits(takeover_ms=2_000)),
    "L2 slept too long": (
        "L2",
        lambda: Tale().put().wait(9_000).claim().run().settle().final(),
        Limits(lateness_ms=5_000),
    ),
    "L3 a lane that starved": (
        "L3",
        lambda: Tale().put().wait(9_000).claim().run().settle().final(),
        Limits(lane_lateness_ms={"x": 5_000}),
    ),
    "L4 due and left": ("L4", lambda: Tale().put().wait(10).final(pending(state="overdue")), Limits()),
    "L5 the poison goes on": (
        "L5",
        lambda: delivered().put("p").final(pending("p")),
        Limits(poison={"p": "killed_worker"}),
    ),
    "L5 a neighbour was given up": (
        "L5",
        lambda: Tale().put("p").put("a").final(dead=("p", "a")),
        Limits(poison={"p": "killed_worker"}),
    ),
    "R1 tasks leak": (
        "R1",
        lambda: delivered().resources("baseline", 4).resources("end", 9).final(),
        Limits(spare=2),
    ),
}


def test_messages_of_several_shards_that_are_due_at_once_have_no_order() -> None:
    ended(one_claim_of_two(first_answered=True)).report(Limits()).verify()


@pytest.mark.parametrize("name", CLEAN)
def test_a_clean_history_passes(name: str) -> None:
    CLEAN[name]().report(Limits(in_order={"x"})).verify()


@pytest.mark.parametrize("name", GUILTY)
def test_a_history_that_breaks_a_rule_fails_for_it(name: str) -> None:
    rule, tale, limits = GUILTY[name]
    report = tale().report(limits)
    assert {violation.rule for violation in report.violations} == {rule}, report.violations
    with pytest.raises(AssertionError, match=f"{rule}: "):
        report.verify()


def test_a_lost_server_excuses_nothing_that_was_done_before_it_fell_behind() -> None:
    assert {violation.rule for violation in settled_twice(since=20).report().violations} == {"S6", "B1"}


def test_a_command_that_no_lost_server_carried_out_explains_nothing() -> None:
    assert {violation.rule for violation in fired_and_not_found(is_server_lost=False).report().violations} == {"S1"}


def test_nothing_that_was_wholly_put_back_comes_from_its_source_again() -> None:
    assert {violation.rule for violation in put_back(answer="settled").report().violations} == {"S6", "B1"}


def test_every_rule_has_a_history_that_breaks_it() -> None:
    assert {rule for rule, _, _ in GUILTY.values()} == set(RULES)


def test_a_line_cut_short_by_a_kill_costs_only_itself(tmp_path: Path) -> None:
    one, other = (h.History(tmp_path / "h.jsonl", name) for name in ("one", "other"))
    one.write(h.Claiming(call=1))
    with (tmp_path / "h.jsonl").open("ab") as file:
        file.write(b'\n{"event":"claiming","call":2,"proc')
    other.write(h.Claiming(call=3))
    one.close()
    other.close()
    assert [(e.process, e.call) for e in h.read(tmp_path / "h.jsonl") if isinstance(e, h.Claiming)] == [
        ("one", 1),
        ("other", 3),
    ]


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    program = (
        "import sys; from aiodelay.testing.history import *; h = History(sys.argv[1], sys.argv[2])\n"
        "for i in range(500): h.write(Invoked(call=i, op='cancel', id='x' * 200))"
    )
    path = tmp_path / "h.jsonl"
    writers = [Popen([sys.executable, "-c", program, str(path), name], cwd=ROOT) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    events = h.read(path)
    assert len(events) == 1_500
    assert all(isinstance(event, h.Invoked) and event.id == "x" * 200 for event in events)


# --- evidence ---------------------------------------------------------------------------------------------


def evidence(story: Tale, limits: Limits | None = None) -> list[str]:
    """Return the evidence of the only violation of a story: each line without its time, revisions and due times."""
    report = story.report(limits)
    (violation,) = report.violations
    found = lines_of(report.evidence(violation))
    return [re.sub(r"^ +[\d.]+ ms +|, due .*|,? revision \d+|/\d+/\d+", "", line) for line in found]


def busy() -> Tale:
    """Another message is stored, delivered and settled, by calls that also concern the message `a`."""
    story = Tale().process("opened").put("other").put(due=9).command("cancel", "cancelled")
    return story.wait(20).claim("other", "a", lapses=1).run("other").settle("other")


def test_the_evidence_names_only_the_messages_and_calls_concerned() -> None:
    assert evidence(busy().run(due=9).settle().process("closed").final()) == [
        "producer  asks to schedule a",
        "producer  is answered: stored",
        "producer  asks to cancel a",
        "producer  is answered: cancelled",
        "p         asks for messages",
        "p         claims a",
        "p         begins attempt 1 at a",
        "p         ends attempt 1 at a: ok",
    ]


def test_the_evidence_of_a_lost_message_shows_what_was_stored_and_what_is_left() -> None:
    story = delivered("other").put().process("ready", by="q").final(pending("other", version=2))
    assert evidence(story) == [
        "producer  asks to schedule a",
        "producer  is answered: stored",
        "judge     in the end the store holds: none of these messages",
    ]


def test_the_evidence_of_a_lost_message_shows_each_answer_to_its_command() -> None:
    assert evidence(Tale().put(outcome="info").answer_put(1).put("other").final(pending("other"))) == [
        "producer  asks to schedule a",
        "producer  is answered: info",
        "producer  is answered: stored",
        "judge     in the end the store holds: none of these messages",
    ]


def test_the_evidence_of_a_leak_shows_the_two_counts() -> None:
    story = delivered().resources("baseline", 4).process("ready").resources("end", 9).final()
    assert evidence(story) == [
        "p  baseline: 4 tasks, 3 threads, 9 files",
        "p  end: 9 tasks, 3 threads, 9 files",
    ]


def test_every_guilty_history_has_evidence_that_shows_the_same_violation() -> None:
    for name, (_, tale, limits) in GUILTY.items():
        report = tale().report(limits)
        for violation in report.violations:
            found = report.evidence(violation)
            assert violation in check(found, limits).violations, name
            assert len(found) <= len(tale().events), name


def test_the_message_of_a_failed_check_holds_the_evidence() -> None:
    with pytest.raises(AssertionError, match=r"(?s)S2: a revision.*asks to schedule a.*none of these messages"):
        Tale().put().final().report().verify()


def test_what_a_history_cannot_decide_is_said() -> None:
    report = delivered().moved().report()
    assert report.violations == []
    assert set(report.undecided) == {"S2", "S9", "B2", "L1", "L2", "L3", "L4", "L5", "R1"}
    assert "S9" not in delivered().report(Limits(in_order={"x"})).undecided
    assert "the store itself has moved messages of x" in delivered().moved().final().report().undecided["S2"]


def test_lateness_is_measured_from_the_time_at_which_a_message_could_run() -> None:
    assert delivered().report().lateness_ms == (2, 2, 2)
