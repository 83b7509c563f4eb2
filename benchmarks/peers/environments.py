"""An environment for each peer, in a cache folder: a virtual environment, or a folder of npm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import aiodelay

from .sides import AIODELAY, Peer, requirements

__all__ = ["CACHE", "Environment", "MissingPeerError", "environment", "environments_of", "is_installed", "versions"]

CACHE = Path(os.environ.get("AIODELAY_PEERS") or Path.home() / ".cache" / "aiodelay-peers")
"""The folder for environments, if the command names no other."""
_ROOT = Path(__file__).parents[2]
_PROGRAMS = Path(__file__).with_name("programs")
_INSTALLED = "installed.txt"
"""A file with the requirements that pip or npm has installed. It is written last."""
LINES_SHOWN = 4
"""The lines of an error of pip or npm that a message shows. The last line of npm only names a file."""


class MissingPeerError(Exception):
    """A peer cannot be installed here. It is left out, and the text says why."""


class Environment(NamedTuple):
    """The command of a peer's program, without `schedule` or `work`, and its environment variables."""

    command: tuple[str, ...]
    variables: dict[str, str]


def is_installed(peer: Peer, cache: Path) -> bool:
    """Return whether the cache has the pinned versions of a peer."""
    installed = cache / peer.name / _INSTALLED
    return peer == AIODELAY or (installed.exists() and installed.read_text(encoding="utf-8") == _text(peer))


def environment(peer: Peer, cache: Path) -> Environment:
    """Return the environment of a peer. Install the peer first, if the cache does not have its pinned versions.

    Raises:
        MissingPeerError: Node.js is missing, or pip or npm failed.
    """
    if peer.is_node and not (shutil.which("node") and shutil.which("npm")):
        raise MissingPeerError("node and npm are not on PATH")
    folder = cache / peer.name
    if not is_installed(peer, cache):
        _install(peer, folder)
    if peer.is_node:
        return Environment(("node", f"{_PROGRAMS / peer.name}.cjs"), {"NODE_PATH": f"{folder / 'node_modules'}"})
    module = ("-m", f"{__package__}.programs.{peer.name}")
    if peer == AIODELAY:
        folder_of_aiodelay = Path(aiodelay.__file__).parents[1]
        return Environment((sys.executable, *module), {"PYTHONPATH": f"{_ROOT}{os.pathsep}{folder_of_aiodelay}"})
    return Environment((f"{folder / 'bin' / 'python'}", *module), {"PYTHONPATH": f"{_ROOT}"})


def environments_of(peers: Sequence[Peer], cache: Path) -> tuple[dict[Peer, Environment], dict[Peer, str]]:
    """Return the environment of each peer, and for each peer that is left out the reason."""
    environments, left_out = dict[Peer, Environment](), dict[Peer, str]()
    for peer in peers:
        try:
            environments[peer] = environment(peer, cache)
        except MissingPeerError as error:
            left_out[peer] = f"{error}"
            print(f"{peer.name} is left out: {error}", file=sys.stderr)
    return environments, left_out


def versions(peers: Collection[Peer]) -> dict[str, str]:
    """Return the pinned packages of the peers, and the version of Node.js if a peer runs on it."""
    pinned = {"peers": " ".join(package for peer in peers for package in requirements(peer))}
    if not any(peer.is_node for peer in peers):
        return pinned
    node = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    return {**pinned, "Node.js": node.stdout.strip()}


def _text(peer: Peer) -> str:
    return "\n".join(requirements(peer))


def _install(peer: Peer, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if peer.is_node:
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", f"{folder}", *requirements(peer)]
    else:
        venv.create(folder, with_pip=True)
        command = [f"{folder / 'bin' / 'python'}", "-m", "pip", "install", "--quiet", *requirements(peer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = "; ".join(done.stderr.strip().splitlines()[-LINES_SHOWN:])
        raise MissingPeerError(f"{' '.join(command[:3])} failed: {reason}")
    (folder / _INSTALLED).write_text(_text(peer), encoding="utf-8")
