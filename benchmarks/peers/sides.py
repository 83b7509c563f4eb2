"""The list of aiodelay and its peers, each with the settings that `programs/` gives it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["AIODELAY", "BASE", "PEERS", "SETTINGS", "Peer", "Settings", "Side", "requirements"]

Settings: TypeAlias = Literal["default", "best"]
SETTINGS: tuple[Settings, ...] = ("default", "best")
_VERSIONS = Path(__file__).with_name("versions.toml")


@dataclass(frozen=True, slots=True)
class Peer:
    """A library whose program is `programs/NAME.py` or `programs/NAME.cjs`.

    Attributes:
        name: The name of the program, and of the peer in versions.toml.
        best: The settings that its program calls its best.
        cancel: How the library cancels a pending message.
        redelivery: When a message runs again after the worker that had it was killed: at defaults, and at best.
        is_node: True if the program runs on Node.js.
    """

    name: str
    best: str
    cancel: str
    redelivery: str
    is_node: bool = False


class Side(NamedTuple):
    """A peer with its default settings or its best documented settings."""

    peer: Peer
    settings: Settings

    def __str__(self) -> str:
        return f"{self.peer.name}, {self.settings}"


AIODELAY = Peer(
    "aiodelay", "concurrency 1,500", "yes", "3 s after the next worker has started, or after its lease (15 s)"
)
BASE = Side(AIODELAY, "default")
"""The side to which all ratios are."""

PEERS: tuple[Peer, ...] = (
    AIODELAY,
    Peer(
        "arq",
        "1,000 jobs at once, a poll each 10 ms, no results, a time limit of 5 s",
        "only with `allow_abort_jobs`, and while a worker runs",
        "10 s after the job's time limit (300 s; best 5 s)",
    ),
    Peer(
        "docket",
        "concurrency 100, 200 connections, a poll each 10 ms, no state of ended tasks",
        "yes",
        "after `redelivery_timeout` (5 min; best 5 s)",
    ),
    Peer(
        "streaq",
        "concurrency 1,000, uvloop, coredis optimized, no results",
        "yes",
        "after `idle_timeout` (60 s; best 5 s)",
    ),
    Peer(
        "taskiq",
        "1,000 tasks at once and prefetched in each of 2 processes, schedules read each 1 s, no log of each task",
        "yes, until the scheduler has sent the message",
        "after `idle_timeout` (10 min; best 5 s), when a worker gets a new message",
    ),
    Peer(
        "celery",
        "prefetch 128, late acknowledgement, no results",
        "yes, but only workers that run at that time learn about it",
        "after the visibility timeout, 1 h; by default never, if its run had begun",
    ),
    Peer(
        "dramatiq",
        "prefetch 1,000, wake-ups each 10 ms, maintenance in one command of 10",
        "no",
        "after the heartbeat timeout (60 s; best 5 s) and the next maintenance",
    ),
    Peer(
        "bullmq",
        "concurrency 300, no results",
        "yes",
        "after the lock expires and a check for stalled jobs (30 s each; best 5 s each)",
        is_node=True,
    ),
)


def requirements(peer: Peer) -> tuple[str, ...]:
    """Return the pinned packages of a peer; nothing for aiodelay, which runs in this environment."""
    if peer == AIODELAY:
        return ()
    pinned: dict[str, dict[str, list[str]]] = tomllib.loads(_VERSIONS.read_text(encoding="utf-8"))
    return tuple(pinned["npm" if peer.is_node else "pip"][peer.name])
