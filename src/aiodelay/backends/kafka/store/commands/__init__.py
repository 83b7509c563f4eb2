"""The commands of a Kafka store.

`Commands` in `commands.py` carries commands out if this process owns all partitions. Otherwise `UserWrites` writes them
as requests to the owners, and `RemoteCancels` asks the owners for the outcomes of cancels. `Intakes` stores commands
with the position of their source. `PutBacks` stores messages that sources put back.
"""

from .commands import Commands
from .intakes import Intakes
from .put_backs import PutBacks
from .remote_cancels import RemoteCancels
from .user_writes import RECORDED, UserWrites

__all__ = ["RECORDED", "Commands", "Intakes", "PutBacks", "RemoteCancels", "UserWrites"]
