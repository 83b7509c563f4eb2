"""The Protocols of stores, sinks and sources, with their promises as numbered rules.

Begin with `store`: every process uses `Store`, and a process that dispatches also uses `Work`.
"""

from .bulk import BulkLoad, Scannable
from .control import DeadLetters, Pauses, PutsBack
from .endpoints import Endpoints
from .feed import Feed, LocalFeed, PartialAnswerError
from .inspection import Inspectable, Instances, Recurring
from .journal import Followed, Journal, JournalReader
from .limits import Limits
from .optional import Bounded, Guarded, Identified, Lists, Loads, Registry, Restricted, Upgradable
from .pulse import Pulse, Pulsing
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
    "Identified",
    "Inspectable",
    "Instances",
    "Journal",
    "JournalReader",
    "Limits",
    "Lists",
    "Loads",
    "LocalFeed",
    "PartialAnswerError",
    "Pauses",
    "Pulse",
    "Pulsing",
    "PutsBack",
    "Recurring",
    "Registry",
    "Restricted",
    "Scannable",
    "Sink",
    "Source",
    "Store",
    "StoreTraits",
    "Transfer",
    "Transferring",
    "Upgradable",
    "Work",
]
