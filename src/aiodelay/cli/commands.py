"""The list of commands, and the text of `aiodelay --help`. This module imports no other part of the command line."""

from __future__ import annotations

import textwrap

from aiodelay.core.version import __version__

__all__ = ["COMMANDS", "RUN", "SUMMARY", "name_of", "overview", "version"]

SUMMARY = "Deliver messages later, durably."
RUN, MESSAGES, INSPECT, MOVE, BULK = "Run", "Messages", "Inspect", "Move", "Bulk"
COMMANDS = (
    (
        "demo:demo",
        RUN,
        "Show messages being scheduled, delivered, retried, cancelled and given up, in a real store.",
    ),
    ("run:run", RUN, "Dispatch and handle until SIGTERM or Ctrl-C, then drain."),
    ("delay_box:delay_box", RUN, "Take requests from Kafka topics, and deliver each message after its countdown."),
    ("serve:serve", RUN, "Run the service: deliver messages, take in requests, and serve an HTTP API and a page."),
    ("config:config", RUN, "Check and show the service's settings; make tokens."),
    ("commands:version", RUN, "Print the version."),
    ("schedule:schedule", MESSAGES, "Store a message, or one for each JSON line on stdin."),
    ("messages:get", MESSAGES, "Show a pending message."),
    ("messages:list_", MESSAGES, "List pending messages, by the time of their next attempt."),
    ("messages:cancel", MESSAGES, "Cancel messages, and series with all their retries."),
    ("messages:reschedule", MESSAGES, "Move a pending message to another due time."),
    ("messages:fire", MESSAGES, "Make pending messages due now."),
    ("lanes:pause", MESSAGES, "Pause an event type, a sink or a destination for all instances, or list the pauses."),
    ("lanes:resume", MESSAGES, "Resume a paused event type, sink or destination."),
    ("limit:limit", MESSAGES, "Limit an event type or a sink for all instances, or show limits and waiting keys."),
    ("load:load", INSPECT, "Show the number of messages that come due in each of the next periods."),
    ("top:top", INSPECT, "Show counts, lateness and lanes, live until Ctrl-C."),
    ("check:check", INSPECT, "Check a store and its server, and print a remedy for each problem."),
    (
        "check_history:check_history",
        INSPECT,
        "Check a recorded history: was a message lost, early, late, doubled or changed?",
    ),
    ("bench:bench", INSPECT, "Measure a store, and compare it with the memory store of this machine."),
    ("plan:plan", INSPECT, "Compute the memory, disk, cores and start time that a store needs for a workload."),
    ("why:why", INSPECT, "Explain the state of a message: why it was not delivered yet, or how it ended."),
    ("export:export", MOVE, "Write pauses, messages and dead letters as JSON lines."),
    ("import_:import_", MOVE, "Store messages from a file of `aiodelay export`, or from another system."),
    ("upgrade:upgrade", MOVE, "Switch on the features that this version knows, once all processes run it."),
    ("reshard:reshard", MOVE, "Move a Redis namespace to another number of shards. Its processes wait meanwhile."),
    ("dead:dead", MESSAGES, "List, show, redrive or purge dead letters."),
    ("spark:spark", BULK, "Load, check, archive, replay and report with Apache Spark."),
)
"""For each command: its module and function, its group, and the line that describes it."""

WIDTH, INDENT = 100, 17


def name_of(place: str) -> str:
    """Return the name of a command."""
    return place.partition(":")[2].strip("_").replace("_", "-")


def overview() -> str:
    """Return the text of `aiodelay --help`: all commands by group, with their descriptions."""
    lines = ["Usage: aiodelay COMMAND [OPTIONS]", "", SUMMARY]
    for group in (RUN, MESSAGES, INSPECT, MOVE, BULK):
        lines += ["", f"{group}:"]
        for place, _, text in (each for each in COMMANDS if each[1] == group):
            first = f"  {name_of(place):<{INDENT - 2}}"
            lines += textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * INDENT)
    return "\n".join(
        [
            *lines,
            "",
            "aiodelay COMMAND --help explains a command. aiodelay --install-completion sets up completion in a shell.",
        ]
    )


def version() -> None:
    """Print the version."""
    print(__version__)
