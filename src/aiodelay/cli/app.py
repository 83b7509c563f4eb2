"""`run_app`: runs one command, writes its errors to stderr and returns its exit code.

The module of a command is imported only when that command is called.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from aiodelay.core.version import __version__

from .commands import COMMANDS, RUN, SUMMARY, name_of

__all__ = ["app", "run_app"]

FAILED, NOT_UNDERSTOOD, INTERRUPTED = 1, 2, 130
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

app: App = App(
    name="aiodelay",
    help=SUMMARY,
    version=__version__,
    help_format="plaintext",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)

for _place, _group, _line in COMMANDS:
    app.command(f"{__package__}.{_place}", name=name_of(_place), group=_group, help=_line)
app.register_install_completion_command(group=RUN)


def run_app(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code (docs/cli.md lists the codes)."""
    from aiodelay.errors import AiodelayError  # noqa: PLC0415 - `--help` needs none of these

    from .errors import CommandError, exit_code_of  # noqa: PLC0415

    try:
        code = app(arguments, exit_on_error=False)
        sys.stdout.flush()
    except CycloptsError:
        return NOT_UNDERSTOOD  # cyclopts has already printed the mistake
    except CommandError as error:
        return _failed(error, error.exit_code, arguments)
    except AiodelayError as error:
        return _failed(error, exit_code_of(error), arguments)
    except OSError as error:
        return _output_failed(error, arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _output_failed(error: OSError, arguments: Sequence[str]) -> int:
    """Return the exit code of a command whose output could not be written.

    Raises:
        OSError: The error has another reason.
    """
    if not isinstance(error, BrokenPipeError) and error.errno not in NO_ROOM:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at its end
    if isinstance(error, BrokenPipeError):  # the reader has closed the pipe, as `| head` does
        return 0
    return _failed(OSError(f"stdout: {error.strerror}"), FAILED, arguments)


def _failed(error: Exception, exit_code: int, arguments: Sequence[str]) -> int:
    if "--json" in arguments:
        from .output import error_line  # noqa: PLC0415 - as above

        line = error_line(error)
    else:
        line = ": ".join(["aiodelay", *reversed(getattr(error, "__notes__", [])), str(error)])
    print(line, file=sys.stderr)
    return exit_code
