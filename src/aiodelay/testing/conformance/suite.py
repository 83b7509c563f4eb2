"""The suite as third parties use it."""

from __future__ import annotations

from .commands import CommandRules
from .dispatching import DispatchRules
from .inspection import LookingRules
from .leases import LeaseRules
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
    LookingRules,
    ReturningRules,
    LoadingRules,
    UpgradeRules,
):
    """What every store must do, as tests named after the rules of docs/guarantees.md.

    Subclass it in a test module, say how a store is made, and let pytest collect the class:

    ```python
    class TestMyStore(StoreConformance):
        def make_store(self, clock, *, journal=0):
            return MyStore(clock=clock)
    ```

    Each test has a new store, an event loop of its own, and a clock that only the test moves; nothing sleeps. No
    plugin for async tests is needed, and any may be there. `new_loop` may be overridden for another event loop.

    A store that says `durable` in its traits also overrides `reopen`. Of some promises the traits do not tell; the
    subclass does, by class attributes: `order_per_group`, `leases_survive`, `counted_journal`, `wakes_other_processes`.
    The suite skips a rule that traits or attributes declare away, and the rules of `BulkLoad` and `Upgradable` on a
    store without them; each skipped test says why.

    To see that a test can fail, call it: `MySuite().test_s6_nothing_ended_comes_back()` raises `AssertionError` on a
    store that breaks the rule.
    """
