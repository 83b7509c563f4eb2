"""`StoreConformance`: the suite that every store must pass, also a store outside aiodelay."""

from __future__ import annotations

from .commands import CommandRules
from .dispatching import DispatchRules
from .inspection import LookingRules
from .leases import LeaseRules
from .limiting import LimitRules
from .loading import LoadingRules
from .recurring import RecurringRules
from .returning import ReturningRules
from .safety import SafetyRules
from .upgrading import UpgradeRules

__all__ = ["StoreConformance"]


class StoreConformance(
    SafetyRules,
    CommandRules,
    LeaseRules,
    RecurringRules,
    DispatchRules,
    LimitRules,
    LookingRules,
    ReturningRules,
    LoadingRules,
    UpgradeRules,
):
    """The suite for stores: tests named after the rules of docs/guarantees.md.

    Subclass this suite in a test module, say how to make a store, and let pytest collect the class:

    ```python
    class TestMyStore(StoreConformance):
        def make_store(self, clock, *, journal=0):
            return MyStore(clock=clock)
    ```

    Each test has a new store, an event loop of its own, and a clock that only the test moves. No test sleeps in real
    time. The suite needs no plugin for async tests, and works with any. Override `new_loop` to use another event loop.

    If the traits of the store say `durable`, the subclass must also override `reopen`. The traits do not cover all
    promises. The subclass declares the other promises by class attributes: `order_per_group`, `leases_survive`,
    `counted_journal`, `wakes_other_processes`. If the traits or attributes say that the store does not promise a rule,
    the suite skips the rule. If the store lacks `BulkLoad`, `Limits` or `Upgradable`, the suite skips the rules of this
    ability. Each skipped test gives the reason.

    To see that a test can fail, call it on a store that breaks the rule. For example,
    `MySuite().test_s6_nothing_ended_comes_back()` then raises `AssertionError`.
    """
