"""Imports of messages from other systems into a store. All imports use `put_all`, which stores each message once."""

__all__: list[str] = []
