"""An archive's folder: where Spark's log of its files stands, and which files it names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec import Struct

from aiodelay.errors import ConfigurationError, shortened

__all__ = ["CHECKPOINT", "LOG", "Archived", "File", "Listed", "local_path"]

CHECKPOINT: Final = "_checkpoint"
LOG: Final = "_spark_metadata"
_VERSION: Final = "v1"
_WHOLE = re.compile(r"(\d+)\.compact")
_DAY = re.compile(r"/day=(\d{4}-\d\d-\d\d)/")


class File(Struct, frozen=True):
    """A line of the log, as Spark's file sink writes it (version 1, since Spark 2.1)."""

    path: str
    size: int
    isDir: bool  # noqa: N815 - Spark's name
    modificationTime: int  # noqa: N815 - as above
    blockReplication: int  # noqa: N815 - as above
    blockSize: int  # noqa: N815 - as above
    action: str

    @property
    def day(self) -> str:
        """Which day's events it holds, `YYYY-MM-DD`."""
        found = _DAY.search(self.path)
        return found[1] if found else ""

    @property
    def place(self) -> Path:
        """Where it is on this machine."""
        return Path(unquote(urlsplit(self.path).path))


class Listed(Struct, frozen=True):
    """The log as of its last batch.

    Attributes:
        batch: The number of that batch.
        files: What counts; all else in the folder does not.
    """

    batch: int
    files: Sequence[File]


class Archived:
    """An archive on this machine, or mounted here.

    Args:
        folder: As the archive job was told.

    Raises:
        ConfigurationError: It is elsewhere, or no archive of ours.
    """

    def __init__(self, folder: str) -> None:
        path = local_path(folder)
        if path is None:
            raise ConfigurationError("archive", shortened(folder), "a folder of this machine, or one mounted here")
        if not (path / LOG).is_dir():
            raise ConfigurationError("archive", shortened(folder), f"a folder that `archive` has written, with {LOG}")
        self.folder: Path = path

    def listed(self) -> Listed:
        """Return what counts now.

        Raises:
            ConfigurationError: The log was written by another program.
        """
        batches = [
            (int(found[1]), file) for file in (self.folder / LOG).iterdir() if (found := _WHOLE.fullmatch(file.name))
        ]
        newest = max((int(file.name) for file in (self.folder / LOG).iterdir() if file.name.isdigit()), default=-1)
        if not batches or max(batches)[0] < newest:
            allowed = "a folder that `aiodelay spark archive` has written, and nothing else"
            raise ConfigurationError("archive", shortened(f"{self.folder}"), allowed)
        batch, file = max(batches)
        version, *lines = file.read_text(encoding="utf-8").splitlines()
        if version != _VERSION:
            raise ConfigurationError(f"log of {self.folder}", shortened(version), _VERSION)
        return Listed(batch, [msgspec.json.decode(line, type=File) for line in lines])

    def relist(self, listed: Listed) -> bool:
        """Have other files count from now on, in one step; return whether they do: an archive job may have gone on."""
        log = self.folder / LOG
        place, draft = log / f"{listed.batch}.compact", log / f".{listed.batch}.draft"
        with draft.open("wb") as written:
            written.write(
                "\n".join([_VERSION, *(msgspec.json.encode(file).decode() for file in listed.files)]).encode()
            )
            written.flush()
            os.fsync(written.fileno())
        if self.listed().batch == listed.batch:
            (log / f".{place.name}.crc").unlink(missing_ok=True)  # the old one's, by which the new one would be refused
            draft.replace(place)
        draft.unlink(missing_ok=True)
        return set(_paths(listed)) <= set(_paths(self.listed()))

    def unlisted(self, listed: Listed) -> dict[str, list[Path]]:
        """Return by day the Parquet files that do not count."""
        counted = {file.place for file in listed.files}
        found: dict[str, list[Path]] = {}
        for place in self.folder.glob("day=*/*.parquet"):
            if place not in counted:
                found.setdefault(place.parent.name.removeprefix("day="), []).append(place)
        return found


def local_path(folder: str) -> Path | None:
    """Return a folder's path on this machine, absolute; None if its URL says that it is elsewhere."""
    parts = urlsplit(folder)
    if parts.scheme not in ("", "file") or parts.netloc:
        return None
    return Path(os.path.abspath(unquote(parts.path) if parts.scheme else folder))


def _paths(listed: Listed) -> list[str]:
    return [file.path for file in listed.files]
