"""How fast it is, each figure beside a bare limit: `python -m benchmarks --help`, docs/performance.md."""
