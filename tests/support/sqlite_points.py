"""Failure points inside SQLite's transactions, in the writer's thread."""

from __future__ import annotations

from aiodelay.backends.sqlite.connection import Database

from .observed import FailurePoints

__all__ = ["install"]


def install(points: FailurePoints) -> None:
    """Count the points of this process's transactions: begin, each statement, and commit."""
    begin, commit = Database.begin, Database.commit

    def observed_begin(self: Database, *, is_durable: bool) -> None:
        points.passes_inside("begin", "before")
        begin(self, is_durable=is_durable)
        points.passes_inside("begin", "after")
        self.connection.set_trace_callback(lambda _: points.passes_inside("statement", "before"))

    def observed_commit(self: Database) -> None:
        self.connection.set_trace_callback(None)
        points.passes_inside("commit", "before")
        commit(self)
        points.passes_inside("commit", "after")

    Database.begin = observed_begin  # type: ignore[method-assign]
    Database.commit = observed_commit  # type: ignore[method-assign]
