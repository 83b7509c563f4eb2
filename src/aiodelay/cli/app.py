"""The commands, put together: what they are called, how they end, where errors go.

Commands are named by their place and imported when they are asked for: `--help` loads none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from aiodelay._version import __version__

__all__ = ["app", "run_app"]

NOT_UNDERSTOOD, INTERRUPTED = 2, 130

app: App = App(
    name="aiodelay",
    help="Deliver messages later, durably.",
    version=__version__,
    help_format="plaintext",
    result_action="return_value",
)

RUN, MESSAGES, LOOK, MOVE = "Run", "Messages", "Look", "Move"
COMMANDS = (
    (
        "demo:demo",
        RUN,
        "Show messages being scheduled, delivered, retried, cancelled and given up, for real.",
    ),
    ("run:run", RUN, "Dispatch and handle until SIGTERM or Ctrl-C, then drain."),
    ("delay_box:delay_box", RUN, "Take in what services ask for on Kafka topics, and deliver it when its time is up."),
    ("serve:serve", RUN, "Run the service: stores whose messages are delivered, intakes, and an HTTP API."),
    ("config:config", RUN, "Check and show the service's settings; make tokens."),
    ("schedule:schedule", MESSAGES, "Store a message, or one for each JSON line on stdin."),
    ("messages:get", MESSAGES, "Show a message that is pending or in flight."),
    ("messages:list_", MESSAGES, "List messages that are pending or in flight, by the time of their next attempt."),
    ("messages:cancel", MESSAGES, "End messages, and series with all their retries."),
    ("messages:reschedule", MESSAGES, "Move a pending message to another time."),
    ("messages:fire", MESSAGES, "Make pending messages due now."),
    ("lanes:pause", MESSAGES, "Hold back an event type, a sink, or one destination, for all instances."),
    ("lanes:resume", MESSAGES, "Release what `pause` holds back."),
    ("load:load", LOOK, "Show how many messages come due in each of the next spans of time."),
    ("top:top", LOOK, "Show counts, lateness and lanes, live until Ctrl-C."),
    ("check:check", LOOK, "Say what is right or wrong with a server, topic or layout, and the command that mends it."),
    ("why:why", LOOK, "Tell the whole story of a message, and why it did not arrive."),
    ("export:export", MOVE, "Write holds, messages and dead letters as JSON lines."),
    ("import_:import_", MOVE, "Store what `aiodelay export` has written, or what other systems keep."),
    ("dead:dead", MESSAGES, "List dead letters, give them a new life, or delete them."),
)
for place, group, line in COMMANDS:
    name = place.partition(":")[2].strip("_").replace("_", "-")
    app.command(f"{__package__}.{place}", name=name, group=group, help=line)


@app.command(group=RUN)
def version() -> None:
    """Print the version."""
    print(__version__)


def run_app(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code, as docs/cli.md lists them."""
    from aiodelay.errors import AiodelayError  # noqa: PLC0415 - `--help` needs none of these

    from .errors import CommandError, exit_code_of  # noqa: PLC0415

    try:
        code = app(arguments, exit_on_error=False)
        sys.stdout.flush()
    except CycloptsError:
        return NOT_UNDERSTOOD  # cyclopts has said what is wrong
    except CommandError as error:
        return _failed(error, error.exit_code, arguments)
    except AiodelayError as error:
        return _failed(error, exit_code_of(error), arguments)
    except BrokenPipeError:  # the reader has what it wanted, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _failed(error: Exception, exit_code: int, arguments: Sequence[str]) -> int:
    if "--json" in arguments:
        from .output import error_line  # noqa: PLC0415 - as above

        line = error_line(error)
    else:
        line = ": ".join(["aiodelay", *reversed(getattr(error, "__notes__", [])), str(error)])
    print(line, file=sys.stderr)
    return exit_code
