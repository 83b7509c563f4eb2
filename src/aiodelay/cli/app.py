"""The commands, put together: what they are called, how they end, where errors go."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from aiodelay import AiodelayError, __version__

from .delay_box import delay_box
from .demo import demo
from .errors import FAILED, NOT_UNDERSTOOD, CommandError
from .run import run

__all__ = ["app", "run_app"]

app: App = App(
    name="aiodelay", help="Deliver messages later, durably.", version=__version__, result_action="return_value"
)
app.command(delay_box)
app.command(demo)
app.command(run)


@app.command
def version() -> None:
    """Print the version."""
    print(__version__)


def run_app(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code: 0 done, 1 failed, 2 not understood."""
    try:
        app(arguments, exit_on_error=False)
    except CycloptsError:
        return NOT_UNDERSTOOD  # cyclopts has said what is wrong
    except CommandError as error:
        return _failed(error, error.exit_code)
    except AiodelayError as error:
        return _failed(error, FAILED)
    return 0


def _failed(error: Exception, exit_code: int) -> int:
    print(": ".join(["aiodelay", *reversed(getattr(error, "__notes__", [])), str(error)]), file=sys.stderr)
    return exit_code
