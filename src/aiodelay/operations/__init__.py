"""What the CLI, the API and the page share: queries, activity, the diagnosis of one message, and the JSON forms."""

__all__: list[str] = []
