import copy
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodelay.core.retry import MAX_ATTEMPTS, GiveUp, Retry, RetryAfter, RetryDecision
from aiodelay.errors import ConfigurationError

MIDDLE = 0.5  # no jitter
ERROR = RuntimeError("no")
randoms = st.floats(0, 1, exclude_max=True)
durations = st.integers(0, 86_400_000).map(lambda ms: f"{ms}ms")
plans = st.builds(
    Retry,
    attempts=st.integers(1, 60),
    first=durations,
    factor=st.floats(1, 1e308),
    cap=st.just("3650d"),
    jitter=st.floats(0, 1),
) | st.builds(Retry.intervals, st.lists(durations, min_size=1, max_size=20), jitter=st.floats(0, 1))


def waits(retry: Retry, random: float = MIDDLE) -> list[int]:
    """All the waits of a message that never stops failing."""
    found: list[int] = []
    decision: RetryDecision = retry.decide(1, ERROR, random)
    while isinstance(decision, RetryAfter):
        found.append(decision.delay_ms)
        decision = retry.decide(len(found) + 1, ERROR, random)
    return found


class TestPlans:
    def test_default(self) -> None:
        seconds = [5, 10, 20, 40, 80, 160, 320, 640, 1280]
        assert waits(Retry()) == [1000 * s for s in seconds]

    def test_attempts_count_all_runs(self) -> None:
        assert [len(waits(Retry(attempts=n))) for n in (1, 2, 10)] == [0, 1, 9]
        assert Retry(attempts=10).attempts == 10

    def test_the_cap_holds(self) -> None:
        assert waits(Retry(attempts=6, first="1s", factor=10, cap="1m")) == [1000, 10_000, 60_000, 60_000, 60_000]

    def test_factor_one_keeps_the_interval(self) -> None:
        assert waits(Retry(attempts=4, first="1s", factor=1)) == [1000] * 3

    def test_broken_factors_do_not_accumulate_rounding(self) -> None:
        assert waits(Retry(attempts=5, first="1s", factor=1.1, jitter=0)) == [1000, 1100, 1210, 1331]

    def test_a_first_of_zero_retries_at_once(self) -> None:
        assert waits(Retry(attempts=3, first="0s")) == [0, 0]

    @pytest.mark.parametrize("factor", [10, 1e308])
    def test_no_overflow(self, factor: float) -> None:
        assert waits(Retry(attempts=MAX_ATTEMPTS, factor=factor))[-1] == 3_600_000

    def test_intervals(self) -> None:
        retry = Retry.intervals(["5s", "1m", "10m"])
        assert waits(retry) == [5000, 60_000, 600_000]
        assert retry.attempts == 4

    def test_never(self) -> None:
        assert Retry.never().decide(1, ERROR, MIDDLE) == GiveUp("not_retryable")
        assert Retry.never() == Retry(attempts=1, jitter=1)

    def test_equal_plans_are_equal(self) -> None:
        assert Retry(attempts=3, first="5s") == Retry.intervals(["5s", "10s"])
        assert hash(Retry(attempts=3, first="5s")) == hash(Retry.intervals(["5s", "10s"]))
        assert Retry(jitter=0.2) != Retry()

    def test_plans_are_values(self) -> None:
        retry = Retry(by_type={ValueError: Retry.never()})
        assert pickle.loads(pickle.dumps(retry)) == copy.deepcopy(retry) == retry
        with pytest.raises(AttributeError):
            retry.jitter = 0.5  # type: ignore[misc]

    @pytest.mark.parametrize(
        ("retry", "text"),
        [
            (Retry.never(), "Retry.never()"),
            (Retry(attempts=3, first="1.5s", jitter=0), "Retry.intervals(['1.5s', '3s'], jitter=0.0)"),
            (
                Retry(attempts=2, by_type={ValueError: Retry.never()}),
                "Retry.intervals(['5s'], jitter=0.1, by_type={ValueError: Retry.never()})",
            ),
            (
                Retry(attempts=1, by_type={OSError: Retry(attempts=2)}),
                "Retry(attempts=1, by_type={OSError: Retry.intervals(['5s'], jitter=0.1)})",
            ),
        ],
    )
    def test_repr_is_the_call_that_makes_it(self, retry: Retry, text: str) -> None:
        assert repr(retry) == text
        assert eval(text) == retry


class TestDecisions:
    @pytest.mark.parametrize(("random", "delay_ms"), [(0.0, 9000), (0.25, 9500), (0.5, 10_000), (0.75, 10_500)])
    def test_jitter(self, random: float, delay_ms: int) -> None:
        assert Retry(first="10s", jitter=0.1).decide(1, ERROR, random) == RetryAfter(delay_ms)

    def test_jitter_comes_after_the_cap(self) -> None:
        retry = Retry(attempts=50, cap="1h", jitter=0.5)
        assert retry.decide(49, ERROR, 0.0) == RetryAfter(1_800_000)
        assert retry.decide(49, ERROR, math.nextafter(1, 0)) == RetryAfter(5_400_000)

    def test_the_last_attempt_is_the_last(self) -> None:
        assert Retry(attempts=3).decide(2, ERROR, MIDDLE) == RetryAfter(10_000)
        assert Retry(attempts=3).decide(3, ERROR, MIDDLE) == GiveUp("attempts_exhausted")
        assert Retry(attempts=3).decide(7, ERROR, MIDDLE) == GiveUp("attempts_exhausted")

    @given(plans, st.integers(1, 70), randoms)
    def test_every_wait_lies_within_its_jitter(self, retry: Retry, attempt: int, random: float) -> None:
        decision = retry.decide(attempt, ERROR, random)
        if attempt < retry.attempts:
            assert isinstance(decision, RetryAfter)
            delay_ms = retry.delays_ms[attempt - 1]
            assert decision.delay_ms >= 0
            assert delay_ms * (1 - retry.jitter) - 1 <= decision.delay_ms <= delay_ms * (1 + retry.jitter)
        else:
            assert isinstance(decision, GiveUp)

    @given(plans, st.integers(1, 70), randoms)
    def test_decisions_depend_on_nothing_else(self, retry: Retry, attempt: int, random: float) -> None:
        assert retry.decide(attempt, ERROR, random) == retry.decide(attempt, ERROR, random)


class TestByType:
    retry = Retry(
        attempts=5,
        by_type={
            OSError: Retry(attempts=3, first="1s"),
            ConnectionError: Retry(attempts=4, first="2s"),
            ValueError: Retry.never(),
        },
    )

    @pytest.mark.parametrize(
        ("error", "decision"),
        [
            (RuntimeError(), RetryAfter(5000)),
            (OSError(), RetryAfter(1000)),
            (FileNotFoundError(), RetryAfter(1000)),
            (ConnectionError(), RetryAfter(2000)),
            (ConnectionResetError(), RetryAfter(2000)),
            (ValueError(), GiveUp("not_retryable")),
            (UnicodeError(), GiveUp("not_retryable")),
            (ExceptionGroup("two", [ValueError(), ValueError()]), RetryAfter(5000)),
        ],
    )
    def test_the_most_specific_class_decides(self, error: Exception, decision: RetryDecision) -> None:
        assert self.retry.decide(1, error, MIDDLE) == decision

    def test_order_of_the_mapping_does_not_matter(self) -> None:
        reverse = Retry(attempts=5, by_type=dict(reversed([*self.retry.by_type.items()])))
        assert reverse.decide(1, ConnectionError(), MIDDLE) == RetryAfter(2000)

    def test_a_class_of_two_bases_follows_its_mro(self) -> None:
        class BothError(ValueError, OSError): ...

        class OtherError(OSError, ValueError): ...

        assert self.retry.decide(1, BothError(), MIDDLE) == GiveUp("not_retryable")
        assert self.retry.decide(1, OtherError(), MIDDLE) == RetryAfter(1000)

    def test_runs_are_counted_whatever_they_failed_with(self) -> None:
        assert self.retry.decide(3, OSError(), MIDDLE) == GiveUp("attempts_exhausted")
        assert self.retry.decide(4, RuntimeError(), MIDDLE) == RetryAfter(40_000)
        assert self.retry.decide(4, ValueError(), MIDDLE) == GiveUp("not_retryable")

    def test_all_errors_can_be_refused_but_one(self) -> None:
        retry = Retry(attempts=1, by_type={TimeoutError: Retry(attempts=2)})
        assert retry.decide(1, ERROR, MIDDLE) == GiveUp("not_retryable")
        assert retry.decide(1, TimeoutError(), MIDDLE) == RetryAfter(5000)

    def test_the_mapping_is_copied(self) -> None:
        by_type: dict[type[BaseException], Retry] = {ValueError: Retry.never()}
        retry = Retry(by_type=by_type)
        by_type.clear()
        assert retry.decide(1, ValueError(), MIDDLE) == GiveUp("not_retryable")

    def test_intervals_take_it_too(self) -> None:
        retry = Retry.intervals(["1s"], by_type={ValueError: Retry.never()})
        assert retry.decide(1, ValueError(), MIDDLE) == GiveUp("not_retryable")


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"attempts": 0}, "retry.attempts is 0; allowed: a whole number from 1 to 1000; it counts all runs"),
            ({"attempts": 1001}, "retry.attempts is 1001; allowed: a whole number from 1 to 1000"),
            ({"attempts": -1}, "retry.attempts is -1"),
            ({"attempts": 2.0}, "retry.attempts is 2.0"),
            ({"attempts": True}, "retry.attempts is True"),
            ({"attempts": None}, "retry.attempts is None"),
            ({"first": "soon"}, "retry.first is 'soon'; allowed: text such as"),
            ({"first": 5}, "retry.first is 5; allowed: a timedelta or text such as"),
            ({"first": "2h"}, "retry.cap is '1h'; allowed: at least retry.first, which is 2h"),
            ({"cap": "1s"}, "retry.cap is '1s'; allowed: at least retry.first, which is 5s"),
            ({"cap": math.inf}, "retry.cap is inf"),
            ({"factor": 0.9}, "retry.factor is 0.9; allowed: a finite number >= 1"),
            ({"factor": math.nan}, "retry.factor is nan"),
            ({"factor": math.inf}, "retry.factor is inf"),
            ({"factor": 10**400}, "retry.factor is 10000"),
            ({"factor": "2"}, "retry.factor is '2'"),
            ({"factor": True}, "retry.factor is True"),
            ({"jitter": -0.1}, "retry.jitter is -0.1; allowed: a number from 0 to 1"),
            ({"jitter": 1.1}, "retry.jitter is 1.1; allowed: a number from 0 to 1"),
            ({"jitter": math.nan}, "retry.jitter is nan"),
            ({"jitter": None}, "retry.jitter is None"),
            ({"by_type": [ValueError]}, "retry.by_type is [<class 'ValueError'>]; allowed: a mapping from exception"),
            ({"by_type": {int: Retry()}}, "a key of retry.by_type is <class 'int'>; allowed: an exception type"),
            ({"by_type": {"ValueError": Retry()}}, "a key of retry.by_type is 'ValueError'"),
            ({"by_type": {ValueError: None}}, "retry.by_type[ValueError] is None; allowed: a Retry, or Retry.never()"),
            (
                {"by_type": {OSError: Retry(by_type={ConnectionError: Retry()})}},
                "retry.by_type[OSError] is a Retry with a by_type of its own; allowed: a Retry without by_type",
            ),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            Retry(**options)
        assert str(caught.value).startswith(message)

    @pytest.mark.parametrize("intervals", [[], "5s", None, {"5s"}, ["1s"] * MAX_ATTEMPTS])
    def test_intervals(self, intervals: object) -> None:
        with pytest.raises(ConfigurationError, match=r"^retry.intervals is .*; allowed: 1 to 999 durations"):
            Retry.intervals(intervals)  # type: ignore[arg-type]

    def test_an_interval_is_named_by_its_place(self) -> None:
        with pytest.raises(ConfigurationError, match=r"^retry\.intervals\[1\] is 'x'; allowed: text such as"):
            Retry.intervals(["5s", "x"])

    def test_intervals_check_what_all_plans_share(self) -> None:
        with pytest.raises(ConfigurationError, match=r"^retry\.jitter is 2; "):
            Retry.intervals(["5s"], jitter=2)
