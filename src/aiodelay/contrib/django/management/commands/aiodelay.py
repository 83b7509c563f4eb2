"""`manage.py aiodelay ...`: every command of `aiodelay`, on the store of the project's tasks."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from django.core.management.base import BaseCommand

from aiodelay.cli import main
from aiodelay.contrib.django.backend import first_backend

__all__ = ["Command"]

WORKER = "aiodelay.contrib.django.worker:scheduler"


class Command(BaseCommand):
    """`manage.py aiodelay run` runs the project's tasks. `manage.py aiodelay` lists all commands."""

    help = "Run the project's tasks (run), or any other command of aiodelay, on the store of the first AiodelayBackend."

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """Run `aiodelay` with all arguments after `manage.py aiodelay`.

        Commands find the store and the namespace in the environment. `run` runs the tasks, unless its first argument is
        a scheduler.
        """
        backend = first_backend()
        os.environ |= {"AIODELAY_STORE": backend.store, "AIODELAY_NAMESPACE": backend.namespace}
        settings = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        for option in ("--settings", "--pythonpath"):  # manage.py has read them already
            settings.add_argument(option)
        _, arguments = settings.parse_known_args(list(argv[2:]))
        if arguments[:1] == ["run"] and all(each.startswith("-") for each in arguments[1:2]):
            arguments.insert(1, WORKER)
        sys.argv[1:] = arguments
        main()
