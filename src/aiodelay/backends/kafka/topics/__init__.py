"""Topics of all kinds: their settings, and their readers and writers outside the store's partitions.

Read `topic` (settings) and `group` (who reads which partition) first.
"""

__all__: list[str] = []
