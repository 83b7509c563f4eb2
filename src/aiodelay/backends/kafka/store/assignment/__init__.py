"""The partitions that this process owns now.

`Assignment` in `assignment.py` takes partitions over and gives them up; `partition_factory.py` makes them. `lookup.py`
finds the partition of a message. `readiness.py` reports to users how many partitions are ready. `look_ahead.py` reads
records into memory before their messages are due. `waiters.py` wakes the workers and transfers that wait for messages.
"""

from .assignment import Assignment
from .lookup import Lookup
from .readiness import Readiness
from .waiters import Waiters

__all__ = ["Assignment", "Lookup", "Readiness", "Waiters"]
