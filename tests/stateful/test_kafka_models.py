"""All interleavings of users, owners, crashes and the cleaner on small logs, with the store's own decisions.

Each model has controls: a step that it rests on is taken away, and a promise must break.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple, TypeVar

import pytest

from aiodelay.backends.kafka.pending.precedence import Precedence, Seen, after, is_forgettable
from aiodelay.backends.kafka.store.partition.session import Session
from aiodelay.backends.kafka.watermark import Watermark

S = TypeVar("S", bound=Hashable)

MOST_STATES = 2_000_000


def explore(first: S, following: Callable[[S], Iterator[S]], check: Callable[[S], None]) -> int:
    """Visit every state once, breadth first; return how many there are. A broken promise tells the way there."""
    came_from: dict[S, S | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        try:
            check(state)
        except BrokenError as error:
            way: list[S] = []
            at: S | None = state
            while at is not None:
                way.append(at)
                at = came_from[at]
            error.add_note("\n".join(f"{each}" for each in reversed(way)))
            raise
        for each in following(state):
            if each not in came_from:
                came_from[each] = state
                waiting.append(each)
        assert len(came_from) < MOST_STATES
    return len(came_from)


class BrokenError(Exception):
    """A promise does not hold in some state."""


def require(promise: str, *, holds: bool) -> None:
    if not holds:
        raise BrokenError(promise)


# --- one key: replaced, cancelled, retried, recurring, while its owner and the cleaner are at work -----------


class Line(NamedTuple):
    """A record of the key: `version` and `run` say which message it holds, at which occurrence and attempt."""

    offset: int
    is_put: bool
    read_to: int | None
    version: int
    run: int = 0


class Plan(NamedTuple):
    """What the owner is about to write, in a transaction: a tombstone or a put, perhaps with a delivery.

    Or the end of a put that was asked for unless one stands, with or without that put.
    """

    line: Line | None
    delivers: tuple[int, int] | None  # version and run
    ends_asked: bool = False


class Owner(NamedTuple):
    """A session: what it has read, how the key stands for it, and what it is about to write."""

    read_to: int
    ready_at: int
    standing: Precedence | None = None
    version: int = 0
    run: int = 0
    plan: Plan | None = None
    unread: int = -1  # the offset of what it wrote last, until it has read it
    asked: int = 0  # the version of a put that counts unless one stands, until its end was read
    is_over: bool = False  # a user's record of the key followed it


class State(NamedTuple):
    log: tuple[Line, ...]  # what the cleaner has left
    whole: tuple[Precedence | None, int]  # how the key stands by all that was ever written, and the version that stands
    end: int
    written: int  # how many of the user's steps are done
    owner: Owner
    crashes: int
    barriers: tuple[int, ...]
    delivered: frozenset[tuple[int, int]]
    twice: bool
    marks: tuple[tuple[int, Watermark], ...] = ()  # at which offsets the owner told what is finished
    asked: tuple[int, int] = (-1, 0)  # where a put unless one stands was written, under a key of its own; its version
    answered: int = -1  # and where its end was
    is_kept: bool = False  # it ended without a put, because one stood
    replaced: bool = False  # it took the place of one that stood

    @property
    def mark(self) -> Watermark:
        return self.marks[-1][1] if self.marks else Watermark()


class Rules(NamedTuple):
    """What the model rests on; the controls change one of them."""

    is_conditional: bool = True  # owners' records say how far their writer had read
    writes_again: bool = True
    cleaner: str = "behind its lag"  # "off", "ahead of the owner's reading", "above what is hidden"
    reads_through: bool = True  # a session dispatches only once it has read its own barrier
    reads_back: bool = True  # it decides about a key only once it has read what it wrote about it
    forgets: str = "what was read"  # "at once"
    marks: str = ""  # "what has ended": the owner tells that, once; "what was read"
    heeds_marks: bool = True
    mends_first: bool = False  # what is hidden is written again, also if a mark tells that it has ended
    vanishing: str = "below the mark"  # tombstones: "anywhere"
    ends_asked_at_once: bool = True  # what was asked for ends in the transaction that puts it
    heeds_who_followed: bool = True  # what was asked for is over once a user has put or cancelled the key
    ends_over_first: bool = True  # and then ends before anything else is written of the key


def one_key(script: str, rules: Rules, *, crashes: int, runs: int) -> int:
    first = State((), (None, 0), 0, 0, Owner(0, 0), crashes, (), frozenset(), twice=False)
    return explore(first, lambda s: steps(s, script, rules, runs), lambda s: check(s, script, rules))


def steps(s: State, script: str, rules: Rules, runs: int) -> Iterator[State]:
    if s.written < len(script) and script[s.written] == "k":
        yield s._replace(asked=(s.end, s.written + 1), end=s.end + 1, written=s.written + 1)
    elif s.written < len(script):
        line = Line(s.end, script[s.written] == "p", None, s.written + 1)
        yield appended(s, line, rules)._replace(written=s.written + 1)
    if s.owner.read_to < s.end:
        yield s._replace(owner=read_on(s, rules))
    if s.owner.plan is None:
        for plan in plans(s.owner, rules, runs, s.mark):
            yield s._replace(owner=s.owner._replace(plan=plan))
    else:
        yield committed(s, s.owner.plan, rules)
    if s.crashes:
        owner = Owner(0, s.end if rules.reads_through else 0)
        yield s._replace(owner=owner, crashes=s.crashes - 1, barriers=(*s.barriers, s.end), end=s.end + 1)
    yield from cleaned(s, rules)
    if rules.marks:
        yield from marked(s, rules)
        yield from vanished(s, rules)


def marked(s: State, rules: Rules) -> Iterator[State]:
    """Tell what is finished: all that stood, if nothing that was read is waiting. All is due at once here."""
    owner = s.owner
    is_waiting = owner.plan is not None or (owner.standing is not None and owner.standing.seen.is_put)
    if s.marks or owner.read_to <= owner.ready_at or (rules.marks == "what has ended" and is_waiting):
        return
    yield s._replace(marks=((s.end, Watermark(0, owner.read_to)),), end=s.end + 1)


def vanished(s: State, rules: Rules) -> Iterator[State]:
    """Lose a tombstone, but not what it ended."""
    for i, line in enumerate(s.log):
        if not line.is_put and (line.offset < s.mark.read_to or rules.vanishing == "anywhere"):
            yield s._replace(log=(*s.log[:i], *s.log[i + 1 :]))


def appended(s: State, line: Line, rules: Rules) -> State:
    return s._replace(log=(*s.log, line), whole=stands((line,), rules, s.whole), end=s.end + 1)


def read_on(s: State, rules: Rules) -> Owner:
    owner = s.owner
    offset, standing, version, run = owner.read_to, owner.standing, owner.version, owner.run
    asked, is_over = owner.asked, owner.is_over
    if offset == s.asked[0]:
        asked = s.asked[1]
    if offset == s.answered:
        asked = 0
    for line in s.log:
        if line.offset == offset:
            standing = after(standing, seen(line, rules))
            if standing.seen.offset == offset:
                version, run = line.version, line.run
            is_over = is_over or (bool(asked) and line.read_to is None and rules.heeds_who_followed)
    if standing is not None and offset in s.barriers and is_forgettable(standing, offset):
        standing = None
    mark = dict(s.marks).get(offset)
    if standing is not None and mark is not None and is_forgettable(standing, mark.read_to):
        standing = None
    if rules.forgets == "at once" and standing is not None and not standing.seen.is_put:
        standing = None
    unread = -1 if owner.unread == offset else owner.unread
    return Owner(offset + 1, owner.ready_at, standing, version, run, owner.plan, unread, asked, is_over)


def seen(line: Line, rules: Rules) -> Seen:
    read_to = line.read_to if rules.is_conditional or line.read_to is None else line.offset
    return Seen(line.offset, line.is_put, read_to)


def plans(owner: Owner, rules: Rules, runs: int, mark: Watermark) -> Iterator[Plan]:
    """What an owner may decide; that it drops a plan again, because the transaction was aborted, changes nothing."""
    standing = owner.standing
    if owner.read_to <= owner.ready_at or (rules.reads_back and owner.unread >= 0):
        return
    if owner.asked:
        if owner.is_over or (standing is not None and standing.seen.is_put):
            yield Plan(None, None, ends_asked=True)
            if owner.is_over and rules.ends_over_first:
                return
        else:
            yield Plan(Line(-1, True, owner.read_to, owner.asked), None, ends_asked=rules.ends_asked_at_once)
    if standing is None:
        return
    line = Line(-1, True, owner.read_to, owner.version, owner.run)
    is_over = rules.heeds_marks and standing.seen.is_put and mark.covers(standing.seen.offset, 0)
    if is_over and not (rules.mends_first and standing.hidden_at is not None):
        yield Plan(line._replace(is_put=False), None)
        return
    if standing.hidden_at is not None and rules.writes_again:
        yield Plan(line._replace(is_put=standing.seen.is_put), None)
    if not standing.seen.is_put:
        return
    if owner.run < runs - 1:  # a failed attempt, or an occurrence of a series: put again, for another time
        yield Plan(line._replace(run=owner.run + 1), None)
        yield Plan(line._replace(run=owner.run + 1), (owner.version, owner.run))
    yield Plan(line._replace(is_put=False), (owner.version, owner.run))


def committed(s: State, plan: Plan, rules: Rules) -> State:
    before = s.whole[1]
    if plan.line is not None:
        s = appended(s, plan.line._replace(offset=s.end), rules)
        asked = s.asked[1]
        s = s._replace(replaced=s.replaced or (bool(asked) and s.whole[1] == asked and before not in (0, asked)))
    if plan.ends_asked:
        is_kept = plan.line is None and not s.owner.is_over
        s = s._replace(answered=s.end, end=s.end + 1, is_kept=is_kept)
    owner = s.owner._replace(plan=None, unread=s.end - 1)
    if plan.delivers is None:
        return s._replace(owner=owner)
    twice = s.twice or plan.delivers in s.delivered
    return s._replace(owner=owner, delivered=s.delivered | {plan.delivers}, twice=twice)


def cleaned(s: State, rules: Rules) -> Iterator[State]:
    """Drop a record that a later one of the key replaces, or a tombstone below which nothing is left."""
    limit, whole = s.end, s.whole[0]
    if rules.cleaner != "above what is hidden" and whole is not None and whole.hidden_at is not None:
        limit = whole.hidden_at
    if rules.cleaner != "ahead of the owner's reading":
        limit = min(limit, max(s.owner.read_to, s.owner.ready_at))
    for i, newer in enumerate(s.log[1:]):
        if newer.offset < limit:
            yield s._replace(log=(*s.log[:i], *s.log[i + 1 :]))
    # Tombstones stay for days: longer than any reader, any transaction, and the time in which what is hidden is mended,
    # or what is asked for is decided.
    plan = s.owner.plan
    unended = min(s.owner.read_to, plan.line.read_to or 0) if plan and plan.line else s.owner.read_to
    hidden = (whole is not None and whole.hidden_at is not None) or s.answered < s.asked[0]
    if s.log and not s.log[0].is_put and s.log[0].offset < unended and not hidden:
        yield s._replace(log=s.log[1:])
    if 0 <= s.answered < s.owner.read_to:
        yield s._replace(asked=(-1, s.asked[1]), answered=-1)


def stands(
    lines: tuple[Line, ...], rules: Rules, before: tuple[Precedence | None, int] = (None, 0)
) -> tuple[Precedence | None, int]:
    standing, version = before
    for line in lines:
        standing = after(standing, seen(line, rules))
        if standing.seen.offset == line.offset:
            version = line.version if line.is_put else 0
    return standing, version


def check(s: State, script: str, rules: Rules) -> None:
    version = s.whole[1]
    require("nothing is delivered twice", holds=not s.twice)
    require("what counts unless one stands replaces nothing", holds=not s.replaced)
    left = stands(s.log, rules)
    require("a reader of what the cleaner left sees what stands", holds=standing_version(*left, s, rules) == version)
    owner, last = s.owner, len(script)
    is_quiet = s.written == last and owner.read_to == s.end and owner.plan is None
    if not is_quiet or owner.read_to <= owner.ready_at:
        return
    knows = standing_version(owner.standing, owner.version, s, rules)
    require("the owner's view is what the log says", holds=knows == version)
    is_hidden = owner.standing is not None and owner.standing.hidden_at is not None
    require("what is hidden is mended", holds=not is_hidden or any(plans(owner, rules, 1, s.mark)))
    if owner.asked:
        require("what is asked for is decided", holds=any(plans(owner, rules, 1, s.mark)))
    elif script[-1] == "k" and s.is_kept:
        require("one stood", holds=version != 0 or bool(s.delivered))
    elif script[-1] == "c":
        require("an acknowledged cancel is honoured", holds=version == 0)
    elif version == 0:
        require("an acknowledged message is delivered", holds=any(each == last for each, _ in s.delivered))
    else:
        require("the newest version stands", holds=version == last)


def standing_version(standing: Precedence | None, version: int, s: State, rules: Rules) -> int:
    """Return the version that stands for a reader; 0: none."""
    if standing is None or not standing.seen.is_put:
        return 0
    return 0 if rules.heeds_marks and s.mark.covers(standing.seen.offset, 0) else version


@pytest.mark.parametrize(
    ("script", "crashes", "runs"),
    [
        *[("ppp", 1, 1), ("pc", 2, 2), ("pcp", 1, 1), ("ppc", 1, 1), ("pp", 1, 2), ("ppcp", 0, 1), ("p", 2, 3)],
        *[("k", 2, 2), ("pk", 1, 2), ("kp", 1, 1), ("kc", 1, 1), ("pck", 1, 1), ("kpc", 0, 1)],
    ],
)
def test_one_key_is_never_lost_doubled_or_brought_back(script: str, crashes: int, runs: int) -> None:
    """`p`: the user puts the key, `c`: cancels it, `k`: puts it unless one stands.

    `runs`: attempts, or occurrences, of each version.
    """
    assert one_key(script, Rules(), crashes=crashes, runs=runs) > 50


@pytest.mark.parametrize(
    ("broken", "script"),
    [
        (Rules(is_conditional=False), "pp"),
        (Rules(writes_again=False), "pc"),
        (Rules(cleaner="above what is hidden"), "pp"),
        (Rules(cleaner="ahead of the owner's reading"), "pp"),
        (Rules(reads_through=False), "p"),
        (Rules(reads_back=False), "p"),
        (Rules(forgets="at once"), "pc"),
        (Rules(ends_asked_at_once=False), "k"),
        (Rules(heeds_who_followed=False), "kc"),
        (Rules(ends_over_first=False), "kp"),
        (Rules(is_conditional=False), "kp"),
    ],
)
def test_each_rule_of_one_key_is_needed(broken: Rules, script: str) -> None:
    with pytest.raises(BrokenError):
        one_key(script, broken, crashes=1, runs=2)


MARKING = Rules(marks="what has ended")


@pytest.mark.parametrize(
    ("script", "crashes", "runs"), [("p", 2, 2), ("pc", 1, 1), ("pp", 1, 1), ("pcp", 1, 1), ("pp", 1, 2)]
)
def test_what_has_ended_does_not_come_back_when_its_tombstone_vanishes(script: str, crashes: int, runs: int) -> None:
    assert one_key(script, MARKING, crashes=crashes, runs=runs) > 50


@pytest.mark.parametrize(
    ("broken", "script"),
    [
        (MARKING._replace(heeds_marks=False), "p"),
        (MARKING._replace(heeds_marks=False), "pc"),
        (MARKING._replace(marks="what was read"), "p"),
        (MARKING._replace(mends_first=True), "pp"),
        (MARKING._replace(vanishing="anywhere"), "p"),
    ],
)
def test_each_rule_of_the_mark_is_needed(broken: Rules, script: str) -> None:
    """The last is no rule of ours: between two marks, a tombstone is all there is."""
    with pytest.raises(BrokenError):
        one_key(script, broken, crashes=1, runs=1)


# --- two owners of one partition that know nothing of each other -------------------------------------------


class Worker(NamedTuple):
    epoch: int = 0
    session: Session = Session()
    pending: frozenset[str] = frozenset()
    takeovers: int = 2


class Two(NamedTuple):
    log: tuple[str, ...]  # a key that was put, `-key` that ended, or `|`, a barrier
    epoch: int
    workers: tuple[Worker, Worker]
    twice: bool


class FenceRules(NamedTuple):
    clears: bool = True  # a session begins without what was read before
    reads_through: bool = True
    fenced: bool = True


def two_owners(rules: FenceRules) -> int:
    first = Two(("a", "b"), 0, (Worker(), Worker()), twice=False)

    def following(s: Two) -> Iterator[Two]:
        for i, worker in enumerate(s.workers):
            for now, changed in worker_steps(s, worker, rules):
                yield now._replace(workers=(changed, s.workers[1]) if i == 0 else (s.workers[0], changed))

    return explore(first, following, lambda s: require("nothing is delivered twice", holds=not s.twice))


def worker_steps(s: Two, worker: Worker, rules: FenceRules) -> Iterator[tuple[Two, Worker]]:
    session = worker.session
    if worker.takeovers:
        kept = Worker(pending=worker.pending, session=Session(session.read_to))
        begun = (Worker() if rules.clears else kept)._replace(epoch=s.epoch + 1, takeovers=worker.takeovers - 1)
        yield s._replace(epoch=s.epoch + 1), begun
    if not worker.epoch:
        return
    if session.barrier is None:
        if worker.epoch == s.epoch:
            yield s._replace(log=(*s.log, "|")), worker._replace(session=session.with_barrier(len(s.log)))
        return
    if session.read_to < len(s.log):
        key = s.log[session.read_to]
        pending = worker.pending - {key[1:]} if key.startswith("-") else worker.pending | {key} - {"|"}
        yield s, worker._replace(session=session.with_read(session.read_to + 1), pending=pending)
    if not session.is_ready and rules.reads_through:
        return
    for key in sorted(worker.pending):
        if worker.epoch == s.epoch or not rules.fenced:
            twice = s.twice or f"-{key}" in s.log
            yield s._replace(log=(*s.log, f"-{key}"), twice=twice), worker._replace(pending=worker.pending - {key})


def test_two_owners_never_deliver_one_message_twice() -> None:
    assert two_owners(FenceRules()) > 1000


def test_an_index_may_be_kept_if_it_is_read_on_through_the_barrier() -> None:
    assert two_owners(FenceRules(clears=False)) > 1000


@pytest.mark.parametrize(
    "broken", [FenceRules(clears=False, reads_through=False), FenceRules(reads_through=False), FenceRules(fenced=False)]
)
def test_each_rule_of_a_session_is_needed(broken: FenceRules) -> None:
    with pytest.raises(BrokenError):
        two_owners(broken)
