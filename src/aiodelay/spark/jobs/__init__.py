"""The jobs of `aiodelay spark`, a module each: pure transforms of frames, and `run`, which returns a `Summary`.

Begin with `snapshot`, the smallest job, then `backfill`.
"""

__all__: list[str] = []
