"""`WorkerLock`: a locked file for each worker. If its lock is free, the process of the worker has ended.

The system frees the lock of a process that ends, however it ends. A lock that is not free proves nothing: the process
may stand still, or a child that it has forked may keep the lock. Nor does a file that is missing: somebody may have
deleted it. In these cases, the leases of the worker decide.

The rule is: a file that contains its own identity (device and inode) is locked while its worker lives. So a worker
writes the identity after it has taken the lock, and erases it before it closes the file. A copy of the file, or a file
that somebody puts in its place, has another identity.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

from msgspec import Struct

__all__ = ["OtherLock", "WorkerLock", "other_lock"]

TRIES = 3
"""Another process may read the file of this worker, or remove the directory, while this worker takes its lock."""
MOST_BYTES = 100
_open_files: set[int] = set()
"""The descriptors of this module. A forked child closes them, so that it does not keep the locks of its parent."""

if sys.platform == "win32":

    def _lock(descriptor: int) -> bool:
        """Return False: without these locks, the leases decide."""
        del descriptor
        return False
else:
    import fcntl

    def _lock(descriptor: int) -> bool:
        """Take the lock of an open file, if it is free. Return False if it is not, or if the system refuses it.

        A lock by `flock` belongs to the open file, not to the process. So two schedulers of one process have
        independent locks, and if a forked child closes the file, its parent keeps the lock.
        """
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _close_in_child() -> None:
        while _open_files:
            os.close(_open_files.pop())

    os.register_at_fork(after_in_child=_close_in_child)


class WorkerLock:
    """The lock of one worker.

    Args:
        database: The path of the database. The locks are in a directory beside it, which the first worker creates and
            the last one removes. Who may use the database may use the directory too.
        directory: The path of that directory.
        name: The name of this worker's file.
    """

    def __init__(self, database: str, directory: str, name: str) -> None:
        self._database, self._directory, self._path = database, directory, os.path.join(directory, name)
        self._pid, self._mutex = os.getpid(), Lock()
        self._descriptor: int | None = None
        self._has_left = False

    def hold(self) -> str:
        """Take the lock, unless this worker holds the lock of the file that is there.

        Returns:
            Why this worker has no lock, or "" if it has one.
        """
        with self._mutex:
            if self._has_left or (self._descriptor is not None and self._is_there(self._descriptor)):
                return ""
            try:
                mode = os.stat(self._database).st_mode & 0o666
                for _ in range(TRIES):
                    if self._take(mode):
                        return ""
            except OSError as error:
                return str(error)
            return f"the file system of {self._directory!r} has no locks between processes"

    def leave(self) -> None:
        """Delete the file. From then on, the leases of this worker decide. A forked child only forgets the file."""
        if os.getpid() != self._pid:
            return
        with self._mutex:
            if self._has_left:
                return
            self._has_left = True
            self._drop()
            with suppress(OSError):
                os.unlink(self._path)
            with suppress(OSError):  # other workers have files there
                os.rmdir(self._directory)

    def _drop(self) -> None:
        """Erase the identity, and then close the file: nobody may believe that this process has ended."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.ftruncate(descriptor, 0)
            _close(descriptor)

    def _take(self, mode: int) -> bool:
        """Create the file of this worker and lock it. Return False if another try may succeed."""
        self._drop()
        with suppress(FileExistsError):
            os.mkdir(self._directory, 0o700)
            os.chmod(self._directory, mode | (mode & 0o444) >> 2)  # who may read the database may enter
        with suppress(FileNotFoundError):
            os.unlink(self._path)  # somebody has put another file there
        try:
            self._descriptor = descriptor = _open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except FileNotFoundError:  # another worker has removed the directory
            return False
        os.chmod(descriptor, mode)
        if _lock(descriptor) and self._excludes():
            os.write(descriptor, _identity(os.fstat(descriptor)))
            return True
        self._drop()
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        return False

    def _excludes(self) -> bool:
        """Return whether the file system keeps a second open file from the lock. Otherwise locks prove nothing."""
        try:
            second = _open(self._path, os.O_RDONLY)
        except FileNotFoundError:  # another process has deleted the empty file
            return False
        try:
            return not _lock(second)
        finally:
            _close(second)

    def _is_there(self, descriptor: int) -> bool:
        try:
            return _identity(os.stat(self._path)) == _identity(os.fstat(descriptor))
        except OSError:
            return False


class OtherLock(Struct, frozen=True):
    """The state of another worker's file.

    Attributes:
        is_free: Whether its lock was free.
        has_ended: Whether the process of the worker has surely ended.
    """

    is_free: bool
    has_ended: bool


@contextmanager
def other_lock(path: str) -> Iterator[OtherLock]:
    """Return a context manager that holds the lock of another worker, if it is free, so that only one process has it.

    Args:
        path: The path of the other worker's file.
    """
    try:
        descriptor = _open(path, os.O_RDONLY)
    except OSError:
        yield OtherLock(is_free=False, has_ended=False)
        return
    try:
        is_free = _lock(descriptor)
        found = os.pread(descriptor, MOST_BYTES, 0) if is_free else b""
        yield OtherLock(is_free, has_ended=is_free and found == _identity(os.fstat(descriptor)))
    finally:
        _close(descriptor)


def _identity(found: os.stat_result) -> bytes:
    return b"%d %d\n" % (found.st_dev, found.st_ino)


def _open(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)  # a program that this process starts does not inherit it
    _open_files.add(descriptor)
    return descriptor


def _close(descriptor: int) -> None:
    _open_files.discard(descriptor)  # First: once the file is closed, another file may get its number.
    os.close(descriptor)
