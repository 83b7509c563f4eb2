"""Benchmarks that compare aiodelay with other libraries. See `python -m benchmarks.peers --help`.

`programs/` has one file for each peer. Each peer runs in an environment of its own, so no other file imports a peer.
"""
