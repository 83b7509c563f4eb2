"""The worker's scheduler as a module, for `aiodelay run tests.faults.programs.app:scheduler`."""

from __future__ import annotations

import os

import msgspec

from aiodelay.testing import history as h
from tests.faults.programs.worker import Plan, scheduler_of
from tests.support.observed import FailurePoints

PLAN = msgspec.json.decode(os.environ["AIODELAY_TEST_PLAN"], type=Plan)
HISTORY = h.History(PLAN.history, PLAN.name)

scheduler = scheduler_of(PLAN, HISTORY, FailurePoints(None, lambda: None))
