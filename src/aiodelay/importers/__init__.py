"""Messages of other systems become messages of a store; `put_all` stores each of them once."""

__all__: list[str] = []
