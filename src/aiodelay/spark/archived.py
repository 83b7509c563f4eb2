"""Reading and replacing the log that names the valid files in an archive's folder.

Spark's file sink writes this log. A file in the folder belongs to the archive only if the log names the file.
"""

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
    """A line of the log: one file, in the format of Spark's file sink (version 1, since Spark 2.1)."""

    path: str
    size: int
    isDir: bool  # noqa: N815 - Spark's name
    modificationTime: int  # noqa: N815 - as above
    blockReplication: int  # noqa: N815 - as above
    blockSize: int  # noqa: N815 - as above
    action: str

    @property
    def day(self) -> str:
        """The day of the events in the file, `YYYY-MM-DD`; empty if the path names no day."""
        found = _DAY.search(self.path)
        return found[1] if found else ""

    @property
    def place(self) -> Path:
        """The path of the file on this machine."""
        return Path(unquote(urlsplit(self.path).path))


class Listed(Struct, frozen=True):
    """The state of the log after its last batch.

    Attributes:
        batch: The number of the last batch.
        files: The valid files. Other files of the folder are not part of the archive.
    """

    batch: int
    files: Sequence[File]


class Archived:
    """An archive on this machine, or mounted here.

    Args:
        folder: The folder that was given to the archive job.

    Raises:
        ConfigurationError: The folder is on another machine, or `archive` has not written it.
    """

    def __init__(self, folder: str) -> None:
        path = local_path(folder)
        if path is None:
            raise ConfigurationError("archive", shortened(folder), "a folder on this machine, or mounted here")
        if not (path / LOG).is_dir():
            raise ConfigurationError("archive", shortened(folder), f"a folder that `archive` has written, with {LOG}")
        self.folder: Path = path

    def listed(self) -> Listed:
        """Return the valid files as of now.

        Raises:
            ConfigurationError: Another program wrote the log.
        """
        batches = [
            (int(found[1]), file) for file in (self.folder / LOG).iterdir() if (found := _WHOLE.fullmatch(file.name))
        ]
        newest = max((int(file.name) for file in (self.folder / LOG).iterdir() if file.name.isdigit()), default=-1)
        if not batches or max(batches)[0] < newest:
            allowed = "a folder into which only `aiodelay spark archive` has written"
            raise ConfigurationError("archive", shortened(f"{self.folder}"), allowed)
        batch, file = max(batches)
        version, *lines = file.read_text(encoding="utf-8").splitlines()
        if version != _VERSION:
            raise ConfigurationError(f"log of {self.folder}", shortened(version), _VERSION)
        return Listed(batch, [msgspec.json.decode(line, type=File) for line in lines])

    def relist(self, listed: Listed) -> bool:
        """Replace the list of valid files in one step.

        Returns:
            True if the new list is valid. False if an archive job has committed a batch in the meantime.
        """
        log = self.folder / LOG
        place, draft = log / f"{listed.batch}.compact", log / f".{listed.batch}.draft"
        with draft.open("wb") as written:
            written.write(
                "\n".join([_VERSION, *(msgspec.json.encode(file).decode() for file in listed.files)]).encode()
            )
            written.flush()
            os.fsync(written.fileno())
        if self.listed().batch == listed.batch:
            # With the old checksum, readers would refuse the new file.
            (log / f".{place.name}.crc").unlink(missing_ok=True)
            draft.replace(place)
        draft.unlink(missing_ok=True)
        return set(_paths(listed)) <= set(_paths(self.listed()))

    def unlisted(self, listed: Listed) -> dict[str, list[Path]]:
        """Return the Parquet files in the folder that `listed` does not name, by day."""
        counted = {file.place for file in listed.files}
        found: dict[str, list[Path]] = {}
        for place in self.folder.glob("day=*/*.parquet"):
            if place not in counted:
                found.setdefault(place.parent.name.removeprefix("day="), []).append(place)
        return found


def local_path(folder: str) -> Path | None:
    """Return the absolute path of a folder on this machine. If the folder's URL names another place, return None."""
    parts = urlsplit(folder)
    if parts.scheme not in ("", "file") or parts.netloc:
        return None
    return Path(os.path.abspath(unquote(parts.path) if parts.scheme else folder))


def _paths(listed: Listed) -> list[str]:
    return [file.path for file in listed.files]
