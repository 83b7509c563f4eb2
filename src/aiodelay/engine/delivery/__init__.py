"""The way of a message from the store: claimed, delivered to a handler, sink or subscriber, and settled.

Begin with `dispatcher`, then `lease_book` and `subscription`.
"""

__all__: list[str] = []
