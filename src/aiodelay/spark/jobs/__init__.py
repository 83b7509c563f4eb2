"""The jobs: each a pure transform of frames, and a `run` that ends in a `Summary`."""

__all__: list[str] = []
