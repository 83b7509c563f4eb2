"""The place where Django looks for commands of `manage.py`."""

__all__: list[str] = []
