"""Where the programs that tests start find aiodelay: where the tests have found it."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import aiodelay

__all__ = ["import_path"]


def import_path(*folders: str) -> str:
    """Return a PYTHONPATH of these folders, and of the one from which this process has imported aiodelay.

    So a program runs the sources if the tests do, and the installed package if the tests do.
    """
    own = f"{Path(aiodelay.__file__).parents[1]}"
    found_anyhow = own == sysconfig.get_path("purelib")  # named here, it would come before the standard library
    return os.pathsep.join(filter(None, [*folders, "" if found_anyhow else own]))
