"""`ShardedScanner`: reads whole tables of all shards. The parts of the shards follow each other."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.connection.pipelined_connection import PipelinedConnection
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.records.shards import ShardLayout, shard_of
from aiodelay.backends.redis.store.table_scan import Part, Scanner
from aiodelay.core.table_scan import Columns, Scan
from aiodelay.errors import StoreUnavailableError

from .opening import layout_in

__all__ = ["ShardPart", "ShardedScanner"]


class ShardPart(Struct, frozen=True):
    """A part of a table of one shard.

    Attributes:
        shard: The number of the shard.
        schema: The layout of the namespace when the table was split.
        part: The part of the shard's table.
    """

    shard: int
    schema: str
    part: Part


class ShardedScanner:
    """Reads the tables of a namespace. It needs no open store.

    Args:
        options: The options of the connections.
        namespace: The namespace.
    """

    def __init__(self, options: Options, namespace: str) -> None:
        self._options, self._namespace = options, namespace

    def parts(self, scan: Scan) -> list[ShardPart]:
        """Split a table into parts. `ports.Scannable` has the rules."""
        layout = self._layout()
        found: list[ShardPart] = []
        for shard in range(layout.shards):
            own = replace(scan, parts=-(-scan.parts // layout.shards))
            if scan.ids is not None:
                own = replace(own, ids=tuple(each for each in scan.ids if shard_of(each, layout.shards) == shard))
            scanner = Scanner(self._options, layout.keys(self._namespace, shard))
            found += [ShardPart(shard, layout.schema, part) for part in scanner.parts(own)]
        return found

    def read(self, scan: Scan, part: ShardPart) -> Iterator[Columns]:
        """Yield the rows of a part. `ports.Scannable` has the rules.

        Raises:
            StoreUnavailableError: The messages were moved to another number of shards. Some rows may be missing.
        """
        layout = ShardLayout.of(part.schema)
        assert layout is not None
        yield from Scanner(self._options, layout.keys(self._namespace, part.shard)).read(scan, part.part)
        if self._layout() != layout:
            reason = f"namespace {self._namespace!r} got another number of shards meanwhile; read the table again"
            raise StoreUnavailableError(self._options.name, reason)

    def _layout(self) -> ShardLayout:
        keys = Keys(self._namespace)
        with PipelinedConnection(self._options, keys) as server:
            schema = server.ask("HGET", keys.key("meta"), "schema")
        return layout_in(self._options.name, self._namespace, schema)
