"""The conformance suites: test classes for authors of stores, transfers, publishers and subscribers.

A test module subclasses a suite and says how to make the object under test. Begin with the module `suite`. The
module `stage` gives each test its store and its clock.
"""

import pytest

# Before the imports below: pytest rewrites the assertions of these modules, so a failed assertion shows its values.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{name}"
        for name in (
            *(
                "appending",
                "cancelling",
                "commands",
                "dispatching",
                "gathering",
                "inspection",
                "leases",
                "limiting",
                "loading",
                "reactive",
                "recurring",
            ),
            *("recurring_retries", "returning", "safety", "stage", "transfer_bench", "transfer_blocked"),
            *("transfer_series", "transferring", "trials", "upgrading"),
        )
    )
)

from .reactive import Probe, ProbeSubscription, PublisherConformance, SubscriberConformance  # noqa: E402
from .stage import Stage, staged  # noqa: E402
from .suite import StoreConformance  # noqa: E402
from .table import SAME_ID_TABLE, Cell, SameId  # noqa: E402
from .transferring import TransferConformance  # noqa: E402

__all__ = [
    "SAME_ID_TABLE",
    "Cell",
    "Probe",
    "ProbeSubscription",
    "PublisherConformance",
    "SameId",
    "Stage",
    "StoreConformance",
    "SubscriberConformance",
    "TransferConformance",
    "staged",
]
