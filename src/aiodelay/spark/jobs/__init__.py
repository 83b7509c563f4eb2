"""The jobs of `aiodelay spark`. Each module has pure transforms of frames, and `run`, which returns a `Summary`.

Begin with `snapshot`, the smallest job, then `backfill`.
"""

__all__: list[str] = []
