"""docs/reactive.md: each D rule has a test, and each Reactive Streams 1.0.4 rule has a D rule or a reason."""

from __future__ import annotations

import re
from pathlib import Path

from aiodelay.testing.conformance import PublisherConformance, SubscriberConformance

PAGE = (Path(__file__).parents[2] / "docs" / "reactive.md").read_text(encoding="utf-8")
RULES = PAGE.partition("## The rules")[2].partition("## Publishers and subscribers")[0]
OURS, _, OTHERS = RULES.partition("These do not apply:")
SPECIFIED = {1: 11, 2: 13, 3: 17, 4: 2}
"""How many rules each chapter of the specification has."""


def test_each_d_rule_has_a_test_in_a_suite_and_each_test_a_rule() -> None:
    numbered = re.findall(r"^\| D(\d+) \|", OURS, re.MULTILINE)
    assert numbered == [str(number) for number in range(1, 22)]
    tests = [name for suite in (PublisherConformance, SubscriberConformance) for name in dir(suite)]
    assert {found[1] for name in tests if (found := re.match(r"test_d(\d+)_", name))} == set(numbered)


def test_each_rule_of_the_specification_is_ours_or_has_a_reason() -> None:
    ours = re.findall(r"\d\.\d+", " ".join(re.findall(r"^\| D\d+ \| ([^|]*) \|", OURS, re.MULTILINE)))
    others = re.findall(r"\d\.\d+", " ".join(re.findall(r"^\| (\d[^|]*) \|", OTHERS, re.MULTILINE)))
    specified = {f"{chapter}.{number}" for chapter, rules in SPECIFIED.items() for number in range(1, rules + 1)}
    assert {*ours, *others} == specified
    assert {*ours} & {*others} == {"3.5"}, "thread safety alone does not apply"
    assert len(ours) == len({*ours})
