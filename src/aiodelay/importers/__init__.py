"""Imports of messages from other systems into a store. `put_all` stores each message once."""

__all__: list[str] = []
