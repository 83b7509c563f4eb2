"""What a store, a sink and a source must do: narrow Protocols, batches on the hot path, promises as numbered rules.

Begin with `store`: `Store` for everyone, `Work` for processes that dispatch.
"""

from .bulk import BulkLoad, Scannable
from .control import DeadLetters, Holds, PutsBack
from .endpoints import Endpoints
from .feed import Feed
from .inspection import Inspectable, Instances, Recurring
from .journal import Followed, Journal, Trail
from .optional import Bounded, Guarded, Identified, Lists, Loads, Registry, Restricted, Upgradable
from .sink import Sink
from .source import Source
from .store import Store, StoreTraits, Work
from .transfer import Transfer, Transferring

__all__ = [
    "Bounded",
    "BulkLoad",
    "DeadLetters",
    "Endpoints",
    "Feed",
    "Followed",
    "Guarded",
    "Holds",
    "Identified",
    "Inspectable",
    "Instances",
    "Journal",
    "Lists",
    "Loads",
    "PutsBack",
    "Recurring",
    "Registry",
    "Restricted",
    "Scannable",
    "Sink",
    "Source",
    "Store",
    "StoreTraits",
    "Trail",
    "Transfer",
    "Transferring",
    "Upgradable",
    "Work",
]
