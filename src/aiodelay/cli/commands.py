"""What commands there are; and `aiodelay --help`, which needs nothing else."""

from __future__ import annotations

import textwrap

from aiodelay.core.version import __version__

__all__ = ["COMMANDS", "RUN", "SUMMARY", "name_of", "overview", "version"]

SUMMARY = "Deliver messages later, durably."
RUN, MESSAGES, LOOK, MOVE, BULK = "Run", "Messages", "Look", "Move", "Bulk"
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
    ("commands:version", RUN, "Print the version."),
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
    ("bench:bench", LOOK, "Measure a store, and this machine's memory store beside it."),
    ("why:why", LOOK, "Tell the whole story of a message, and why it did not arrive."),
    ("export:export", MOVE, "Write holds, messages and dead letters as JSON lines."),
    ("import_:import_", MOVE, "Store what `aiodelay export` has written, or what other systems keep."),
    ("upgrade:upgrade", MOVE, "Switch on the features that this version knows, once all processes run it."),
    ("dead:dead", MESSAGES, "List and show dead letters, give them a new life, or delete them."),
    ("spark:spark", BULK, "Load, check, archive, replay and report with Apache Spark."),
)
"""Place in this package, group, and what it does, for each command."""

WIDTH, INDENT = 100, 14


def name_of(place: str) -> str:
    """Return what a command is called."""
    return place.partition(":")[2].strip("_").replace("_", "-")


def overview() -> str:
    """Return all commands by group, with what each does."""
    lines = ["Usage: aiodelay COMMAND [OPTIONS]", "", SUMMARY]
    for group in (RUN, MESSAGES, LOOK, MOVE, BULK):
        lines += ["", f"{group}:"]
        for place, _, text in (each for each in COMMANDS if each[1] == group):
            first = f"  {name_of(place):<{INDENT - 2}}"
            lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * INDENT)
    return "\n".join(
        [
            *lines,
            "",
            "aiodelay COMMAND --help explains a command; aiodelay --install-completion completes them in a shell.",
        ]
    )


def version() -> None:
    """Print the version."""
    print(__version__)
