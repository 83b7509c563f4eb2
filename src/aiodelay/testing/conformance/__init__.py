"""The conformance suites: for stores, for those that move messages into sinks, for publishers and for subscribers.

Begin with `suite`; `stage` gives each rule its store and its clock.
"""

import pytest

# Before they are imported, so that their assertions explain themselves also where pytest does not know this package.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{name}"
        for name in (
            *("commands", "dispatching", "leases", "inspection", "reactive", "recurring"),
            *("returning", "safety", "stage", "transferring", "upgrading"),
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
