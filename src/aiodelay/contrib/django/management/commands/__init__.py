"""A module for each command of `manage.py`."""

__all__: list[str] = []
