"""Finds or chooses the layout of a namespace: its number of shards and its epoch."""

from __future__ import annotations

from typing import Any

from aiodelay.backends.redis.connection.client import Client
from aiodelay.backends.redis.connection.faults import Fault
from aiodelay.backends.redis.connection.options import Options
from aiodelay.backends.redis.records.keys import Keys
from aiodelay.backends.redis.records.shards import ONE_SHARD, ShardLayout
from aiodelay.errors import StoreMismatchError, StoreUnavailableError, cut

__all__ = ["checked_layout", "chosen_layout", "found_layout", "layout_in"]


async def chosen_layout(options: Options, namespace: str) -> ShardLayout:
    """Return the layout of a namespace. A new namespace gets the number of shards that the URL names.

    Raises:
        StoreUnavailableError: The server did not answer, or messages are being moved to another number of shards.
        StoreMismatchError: The namespace has a layout that this version does not know.
    """
    client = Client(options)
    meta = Keys(namespace).key("meta")
    wanted = ShardLayout(options.shards or 1)
    try:
        schema = await client.command("HGET", meta, "schema")
        if schema is None and wanted.shards > 1:
            # On a cluster, later calls to the other shards are on other nodes. They do not wait for this write.
            await client.command("HSETNX", meta, "schema", wanted.schema, durable=True)
            schema = await client.command("HGET", meta, "schema")
        layout = layout_in(options.name, namespace, schema)
        if layout.shards > 1 and await client.command("HGET", meta, "shards") != b"%d" % layout.shards:
            await client.command("HSET", meta, "shards", layout.shards)
    except Fault as fault:
        raise _error_of(options, fault) from fault
    finally:
        await client.aclose()
    return layout


async def found_layout(options: Options, namespace: str) -> ShardLayout:
    """Return the layout of a namespace, and write nothing. It raises the errors of `chosen_layout`."""
    client = Client(options)
    try:
        schema = await client.command("HGET", Keys(namespace).key("meta"), "schema")
    except Fault as fault:
        raise _error_of(options, fault) from fault
    finally:
        await client.aclose()
    return layout_in(options.name, namespace, schema)


def layout_in(name: str, namespace: str, schema: Any) -> ShardLayout:  # noqa: ANN401 - redis-py's reply
    """Return the layout that a value of `schema` names. None is a new namespace. The errors are as above."""
    if schema is None:
        return ONE_SHARD
    return checked_layout(name, namespace, schema.decode("utf-8", "backslashreplace"))


def checked_layout(name: str, namespace: str, schema: str) -> ShardLayout:
    """Return the layout that a value of `schema` names. The errors are as above."""
    layout = ShardLayout.of(schema)
    if layout is None:
        raise StoreMismatchError(
            f"layout of {Keys(namespace).tag}* on {name}",
            f"schema {cut(schema, 40)}",
            f"schema {ONE_SHARD.schema}, or {ONE_SHARD.schema}:<epoch>:<shards>",
        )
    if layout.is_moving:
        raise StoreUnavailableError(
            name,
            f"namespace {namespace!r} is being moved to another number of shards; if `aiodelay reshard` was stopped,"
            " run it again",
        )
    return layout


def _error_of(options: Options, fault: Fault) -> StoreUnavailableError | StoreMismatchError:
    if fault.mismatch is not None:
        return fault.mismatch
    if fault.is_damage:
        return StoreMismatchError(f"layout of {options.name}", "written by another program", "a hash of aiodelay")
    return StoreUnavailableError(options.name, fault.reason)
