"""The jobs: each a pure transform of frames, and a `run` that ends in a `Summary`.

Begin with `snapshot`, the smallest job, then `backfill`.
"""

__all__: list[str] = []
