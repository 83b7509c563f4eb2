"""The command line: `aiodelay`, or `python -m aiodelay`.

Begin with `app`; `commands` lists all commands with their modules.
"""

from __future__ import annotations

import sys

from .commands import overview

__all__ = ["main"]

HINT = "aiodelay: the command line needs the package {name}; install it with: pip install 'aiodelay[cli]'"


def main() -> None:
    """Run the command line with `sys.argv`, and exit with its code (docs/cli.md lists the codes)."""
    if sys.argv[1:] in ([], ["--help"], ["-h"]):
        print(overview())
        return
    try:
        from .app import run_app  # noqa: PLC0415 - its packages may be missing
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("aiodelay"):
            raise
        print(HINT.format(name=error.name), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(run_app(sys.argv[1:]))
