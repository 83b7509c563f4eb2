"""The versions of aiokafka that aiodelay works with. This package overrides aiokafka's private methods."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from aiodelay.errors import ConfigurationError

__all__ = ["TESTED", "check_version"]

TESTED = ("0.14.0",)
"""The versions of aiokafka that the tests ran with. The extra `kafka` in pyproject.toml requires one of them."""


def check_version() -> None:
    """Refuse a version of aiokafka that the tests did not run with.

    Raises:
        ConfigurationError: Another version is installed.
    """
    installed = _installed()
    if installed not in TESTED:
        tested = f"{', '.join(TESTED)} (pip install 'aiodelay[kafka]')"
        raise ConfigurationError("version of aiokafka", f"{installed}, which aiodelay was not tested with", tested)


@cache
def _installed() -> str:
    return version("aiokafka")
