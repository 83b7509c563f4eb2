"""Topics of all kinds: their settings, and their readers and writers outside the store's partitions.

Begin with `topic` (settings) and `group` (who reads which partition).
"""

__all__: list[str] = []
