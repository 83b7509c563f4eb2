"""The command line: `aiodelay`, or `python -m aiodelay`.

Begin with `app`; `commands` lists all commands with their modules.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from .commands import overview

__all__ = ["main"]

HINT = "aiodelay: the command line needs the package {name}; install it with: pip install 'aiodelay[cli]'"


def main() -> None:
    """Run the command line with `sys.argv`, and exit with its code (docs/cli.md lists the codes)."""
    _open_streams()
    if sys.argv[1:] in ([], ["--help"], ["-h"]):
        print(overview())
        return
    try:
        from .app import INTERRUPTED, run_app  # noqa: PLC0415 - its packages may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("aiodelay"):
            raise
        print(HINT.format(name=error.name), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    code = run_app(sys.argv[1:])
    if code == INTERRUPTED:
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)  # Python would wait for a thread that still reads stdin
    sys.exit(code)


def _open_streams() -> None:
    """Open the null device for each standard stream that the caller has closed. Python has None in its place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - it stays open until the process ends
