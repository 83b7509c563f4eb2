"""The pending messages of one partition: read from its records, kept in memory and on disk, and changed.

Read `pending_index` first.
"""

__all__: list[str] = []
