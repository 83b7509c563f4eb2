"""The commands of a Kafka store.

`Commands` in `commands.py` carries them out as the owner of the partitions, or leaves them to the owners: `UserWrites`
writes them as any user may, and `RemoteCancels` asks for verdicts. `Intakes` stores commands with the position of a
source. `PutBacks` takes messages back.
"""

from .commands import Commands
from .intakes import Intakes
from .put_backs import PutBacks
from .remote_cancels import RemoteCancels
from .user_writes import UserWrites

__all__ = ["Commands", "Intakes", "PutBacks", "RemoteCancels", "UserWrites"]
