"""The pending messages of one partition: read from its records, kept in memory and on disk, and changed.

Begin with `pending_index`.
"""

__all__: list[str] = []
