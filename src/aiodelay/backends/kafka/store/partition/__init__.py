"""One partition of a schedules topic that this process owns.

Begin with `partition.py`, where `Partition` joins the parts. `ownership.py` knows whether the partition serves.
`read_progress.py` has the index. `session_runner.py` runs the sessions. `change_writer.py` writes transactions,
with `batch.py`, `refusals.py`, `user_changes.py`, `history_topic.py` and `unread_changes.py`. `commands.py` and
`moves.py` make the owner's decisions. `index_checkpoints.py` keeps the index on disk. `stall_watch.py` notices a
transaction that stays open.
"""

from .mismatches import moved_keys
from .partition import Partition
from .settings import Callbacks, Place, Shared

__all__ = ["Callbacks", "Partition", "Place", "Shared", "moved_keys"]
