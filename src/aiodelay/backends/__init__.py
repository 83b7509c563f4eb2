"""Stores, sinks and sources, a package for each product; `registry` finds them by their URLs."""

__all__: list[str] = []
