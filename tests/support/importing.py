"""Make the programs that tests start import the same aiodelay as the tests."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import aiodelay

__all__ = ["import_path"]


def import_path(*folders: str) -> str:
    """Return a PYTHONPATH of these folders and of the folder from which this process has imported aiodelay.

    So a program uses the sources if the tests use the sources, and the installed package if the tests use the package.
    """
    own = f"{Path(aiodelay.__file__).parents[1]}"
    found_anyhow = own == sysconfig.get_path("purelib")  # in PYTHONPATH, it would precede the standard library
    return os.pathsep.join(filter(None, [*folders, "" if found_anyhow else own]))
