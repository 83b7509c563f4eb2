"""The options and the output that `benchmarks.peers` and `benchmarks.peers.failures` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.report import put_between_markers

from .environments import CACHE

__all__ = ["parser_of", "publish"]


def parser_of(program: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that every measurement of peers has."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument("names", nargs="*", metavar="arq", help="names of peers (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the full size, to try a peer out")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"folder for environments (default: {CACHE})")
    parser.add_argument("--directory", type=Path, help="folder for files (default: of the system, often /tmp)")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="write the tables between their markers in this file"
    )
    return parser


def publish(text: str, document: Path | None, markers: str) -> None:
    """Print a text, and write it between its markers in a document, if one is given."""
    print(text)
    if document is not None:
        former = document.read_text(encoding="utf-8")
        document.write_text(put_between_markers(former, markers, text), encoding="utf-8")
