"""Django: a backend for Django's tasks, the command `manage.py aiodelay`, and a link from the admin to the page.

Begin with `backend`. The command and the link need `aiodelay.contrib.django` in `INSTALLED_APPS`.
"""

__all__: list[str] = []
