"""docs/django.md: its files are a project, whose tasks and events are scheduled by a view and run by the commands."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import django

from tests.support.command import Program

PAGE = (Path(__file__).parents[2] / "docs" / "django.md").read_text()
BLOCKS = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BASE = """
SECRET_KEY = "of a test"
INSTALLED_APPS = []
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
USE_TZ = True
"""
MANAGE = """
import os, sys
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""
PLACE = """
import asyncio
from shop import handlers
from shop.delays import Remind, delays
from shop.views import place
from django.test import RequestFactory
from aiodelay.contrib.django.backend import first_backend

print(place(RequestFactory().post("/"), 7).content.decode())
tasks = first_backend().blocking
(stored,) = tasks.pending()
print(tasks.fire(stored.record.envelope.id))
delays.schedule(Remind(8), delay="0s")

async def main():
    async with handlers.scheduler:
        await handlers.scheduler.run_until_idle()

asyncio.run(main())
"""


def test_the_page_is_a_project(tmp_path: Path) -> None:
    assert len(BLOCKS) == PAGE.count("```python\n")
    (tmp_path / "shop").mkdir()
    for name, text in BLOCKS:
        code = BASE + text if name == "shop/settings.py" else text
        (tmp_path / name).write_text(code if django.VERSION >= (6,) else code.replace("django.tasks ", "django_tasks "))
    (tmp_path / "manage.py").write_text(MANAGE)
    (tmp_path / "place.py").write_text(PLACE)
    with Program("place.py", cwd=tmp_path, environment={"DJANGO_SETTINGS_MODULE": "shop.settings"}) as program:
        assert program.exit_code() == 0, program.err.seen
        assert program.complaints() == []
        assert program.out.seen == ['{"order": 7}', "fired", "remind the customer of order 8"]
    with Program("manage.py", "aiodelay", "run", "--quiet", "--settings=shop.settings", cwd=tmp_path) as worker:
        worker.out.wait_for(r"is order 7 paid\?")
        worker.send(signal.SIGTERM)
        assert worker.exit_code() == 0
        # Django 6 logs each task.
        assert [line for line in worker.complaints() if " INFO django.tasks" not in line] == []
