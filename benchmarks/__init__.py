"""Benchmarks that compare aiodelay with a bare limit. See `python -m benchmarks --help` and docs/performance.md."""
