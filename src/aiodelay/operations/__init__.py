"""Code that the CLI, the API and the page share: queries, activity, the diagnosis of a message, the JSON forms."""

__all__: list[str] = []
