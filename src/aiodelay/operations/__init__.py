"""What operators see and do: queries, activity, the diagnosis of one message, and their JSON."""

__all__: list[str] = []
