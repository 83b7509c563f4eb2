"""Topics of all kinds: their settings, and what reads and writes them outside the store's partitions.

Begin with `topic` (settings) and `group` (who reads which partition).
"""

__all__: list[str] = []
