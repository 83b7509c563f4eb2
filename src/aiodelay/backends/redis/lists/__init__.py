"""Redis lists as sinks and sources. The sources of topics and logs use the module `list_consumer` too."""

__all__: list[str] = []
