"""Redis lists as sinks and sources; `list_consumer` also takes the messages of topics and logs."""

__all__: list[str] = []
