"""The names under which others find aiodelay: a classifier of a framework promises a module, and a plugin is found."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "AsyncIO": "aiodelay.scheduler",
    "Django": "aiodelay.contrib.django",
    "Pytest": "aiodelay.testing.plugin",
}


def test_each_framework_of_a_classifier_has_a_module() -> None:
    named = {name.split(" :: ")[1] for name in PROJECT["classifiers"] if name.startswith("Framework :: ")}
    assert named == MODULES.keys()
    for module in MODULES.values():
        import_module(module)


def test_pytest_loads_the_plugin_by_its_entry_point() -> None:
    assert PROJECT["entry-points"]["pytest11"] == {"aiodelay": MODULES["Pytest"]}
