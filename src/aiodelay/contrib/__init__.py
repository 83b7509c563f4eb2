"""Doors to frameworks: a package or a module for each framework, which only users of that framework import."""

__all__: list[str] = []
