"""`Database`: a connection to the SQLite file.

It opens and checks the file, upgrades the schema, and explains errors.
"""

from __future__ import annotations

import os
import random
import re
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from msgspec import Struct

from aiodelay.backends.private_files import make_private
from aiodelay.core.features import SQLITE_LAYOUT, newer_layout
from aiodelay.errors import ConfigurationError, StoreMismatchError, StoreTooNewError, StoreUnavailableError

from .forks import check_not_inherited, note_closed, note_opened

__all__ = [
    "APPLICATION_ID",
    "BAD_VALUE",
    "LATER_COLUMNS",
    "LIMITS_SCRIPT",
    "SCHEMA_VERSION",
    "Database",
    "Failure",
    "bad_value",
    "columns_of",
    "decoded_anyhow",
    "failure_of",
    "file_uri",
    "made_by",
    "open_error",
]

APPLICATION_ID = 0x61696F64  # "aiod"
SCHEMA_VERSION = SQLITE_LAYOUT
LEAST_SQLITE = (3, 35, 0)  # The first version with RETURNING.
BUSY_S = 5.0
"""The longest wait for the write lock while another process has it."""
CACHE_KIB = 32_768
# Race: another process may be creating the tables. One statement reads all three values at the same moment.
OWNER = """
    SELECT (SELECT application_id FROM pragma_application_id), (SELECT user_version FROM pragma_user_version),
           (SELECT count(*) FROM sqlite_master)
"""
_MADE = re.compile(r"^CREATE (?:UNIQUE )?(?:TABLE|INDEX|VIEW|TRIGGER) (\w+)", re.MULTILINE)
SCHEMA_SCRIPT, LIMITS_SCRIPT = "schema.sql", "limits.sql"
TABLES = ("namespaces", "lanes", "messages", "queue", "parked", "leases", "ended", "ops", "tombstones", "dead", "holds")
TRIGGERS = ("schedule_insert", "schedule_delete")
"""Triggers whose text may be different in files of older versions."""

LATER_COLUMNS = {
    "earlier_errors": "TEXT",
    "put_due_ms": "INTEGER",
    "debounced_ms": "INTEGER",
    "appended": "BLOB",
    "appended_due_ms": "INTEGER",
}
"""Columns of the table `messages` that files of older versions lack, with their types."""


class Failure(Struct, frozen=True):
    """The reason why a transaction failed.

    Attributes:
        reason: The cause, as text for people.
        is_full: True if there is no room to write.
        is_in_doubt: True if the commit failed, and the changes may or may not be in the file.
        too_new: The error for a file whose features or layout this version does not know, or None. The store's name is
            not in it yet.
    """

    reason: str
    is_full: bool = False
    is_in_doubt: bool = False
    too_new: StoreTooNewError | None = None


BAD_VALUE = (OverflowError, UnicodeError, sqlite3.DataError)
"""Errors from values that no column can hold."""

# Texts for operators, by SQLite's primary result code. For any other code, the text is SQLite's own.
_MEANING = {
    sqlite3.SQLITE_BUSY: f"another process has kept the file locked for {BUSY_S:.0f} s",
    sqlite3.SQLITE_LOCKED: "another process has kept the file locked",
    sqlite3.SQLITE_READONLY: "the file or its directory cannot be written",
    sqlite3.SQLITE_IOERR: "disk I/O error",
    sqlite3.SQLITE_CORRUPT: "the file is damaged",
    sqlite3.SQLITE_NOTADB: "the file is damaged",
    sqlite3.SQLITE_FULL: "no space is left on the disk",
    sqlite3.SQLITE_CANTOPEN: "the file, or its -wal or -shm file, cannot be opened",
    sqlite3.SQLITE_NOMEM: "out of memory",
}
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# If a commit fails with one of these codes, the transaction is certainly not in the file.
_NOT_COMMITTED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_READONLY)
_ROOM = 1 << 20


def failure_of(error: sqlite3.Error, path: str, *, at_commit: bool = False) -> Failure:
    """Return the failure for an SQLite error that made a transaction fail."""
    code = getattr(error, "sqlite_errorcode", 0)
    primary = code & 0xFF
    is_full = primary == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR_WRITE and _lacks_room(path))
    if is_full:
        return Failure(_MEANING[sqlite3.SQLITE_FULL], is_full=True)
    reason = _MEANING.get(primary, "")
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    text = f"{reason} ({name})" if reason else f"{error} ({name})"
    # A write that fails comes before the commit mark in the WAL. A sync that fails may come after the mark.
    in_doubt = at_commit and primary not in _NOT_COMMITTED and code != sqlite3.SQLITE_IOERR_WRITE
    return Failure(text, is_in_doubt=in_doubt)


def bad_value(error: Exception) -> Failure:
    """Return the failure for a value that SQLite refused. The text names the type of the error, and not the value."""
    return Failure(f"the call holds a value that cannot be stored ({type(error).__name__})")


def _lacks_room(path: str) -> bool:
    """Return True if the disk is full, or if a limit on file sizes is reached.

    SQLite reports these two cases with the same code as a broken disk.
    """
    try:
        if sys.platform != "win32":
            import resource  # noqa: PLC0415 - Windows does not have this module

            space = os.statvfs(os.path.dirname(path))
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
            sizes = [os.path.getsize(name) for name in (path, f"{path}-wal") if os.path.exists(name)]
            limited = limit != resource.RLIM_INFINITY and max(sizes, default=0) + _ROOM >= limit
            return limited or space.f_bavail * space.f_frsize < _ROOM
    except OSError:
        pass
    return False


def columns_of(execute: Callable[[str], sqlite3.Cursor], table: str) -> set[str]:
    """Return the names of the columns that a table of a file has."""
    return {name for (name,) in execute(f"SELECT name FROM pragma_table_info('{table}')")}


class Database:
    """A connection to the file, for one thread.

    Args:
        path: The absolute path of the file.
        query_only: True for a connection that must not write.
    """

    def __init__(self, path: str, *, query_only: bool = False) -> None:
        self.path = path
        self._is_full_sync = True
        check_not_inherited(path)
        self.connection: sqlite3.Connection = _opened(path, may_create=not query_only)
        note_opened(self.connection, path)
        try:
            self.connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            self.connection.execute("PRAGMA temp_store = MEMORY")
            if query_only:
                self.connection.execute("PRAGMA query_only = ON")
                self.connection.text_factory = decoded_anyhow
            else:
                self._prepare()
        except sqlite3.Error as error:
            self.close()
            raise open_error(error, path) from error
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        connection = self.connection
        self.check_owner()
        if self._patiently("PRAGMA journal_mode = WAL") != "wal":
            raise StoreMismatchError("sqlite file", repr(self.path), "a file on a file system that allows WAL mode")
        connection.execute("PRAGMA synchronous = FULL")
        # Some builds of SQLite overwrite deleted rows with zeros. Each settlement would then be slower.
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute("PRAGMA journal_size_limit = 67108864")
        self._patiently("BEGIN IMMEDIATE")
        try:
            if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                self._create()
            else:
                self._upgrade()
            connection.execute("COMMIT")
        except BaseException:
            self.rollback()
            raise
        connection.execute("PRAGMA busy_timeout = 0")  # From here on, `_patiently` waits for locks.
        self.check_owner()
        for table in TABLES:  # Find a damaged file when the store opens, not under load.
            connection.execute(f"SELECT * FROM {table} LIMIT 1").fetchall()

    def _create(self) -> None:
        for statement in made_by(SCHEMA_SCRIPT).values():
            self.connection.execute(statement)
        self.connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self.connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _upgrade(self) -> None:
        """Add the columns, triggers and tables that a file of an older version lacks.

        Processes with the older version can still use the file after this.
        """
        connection = self.connection
        known = dict(connection.execute("SELECT name, sql FROM sqlite_master"))
        made, counting = made_by(SCHEMA_SCRIPT), made_by(LIMITS_SCRIPT)
        if counting.keys() & known.keys():
            made |= counting
        for table, later in (("messages", LATER_COLUMNS), ("leases", {"holder": "INTEGER"})):
            columns = columns_of(connection.execute, table)
            for name in (each for each in later if each not in columns):
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} {later[name]}")
        for name in (each for each in (*TRIGGERS, *counting) if each in made):
            if known.get(name) != _sql_of(made[name]):
                connection.execute(f"DROP TRIGGER IF EXISTS {name}")
                known.pop(name, None)
        for name, statement in made.items():
            if name not in known:
                connection.execute(statement)

    def check_owner(self, *, may_be_new: bool = True) -> None:
        """Refuse a file that another program has written.

        Args:
            may_be_new: True if an empty file is allowed.

        Raises:
            StoreMismatchError: Another program has written the file, the schema is newer, or the file is empty and
                `may_be_new` is False.
        """
        owner, version, objects = self.connection.execute(OWNER).fetchone()
        if owner != APPLICATION_ID and (owner or version or objects or not may_be_new):
            raise StoreMismatchError(
                "sqlite file", f"{self.path!r}, another program's database", "a file that only aiodelay uses"
            )
        if version > SCHEMA_VERSION:
            raise StoreMismatchError(
                "schema version", f"{version} in {self.path!r}", f"up to {SCHEMA_VERSION}; install a newer aiodelay"
            )

    def _patiently(self, statement: str) -> object:
        """Execute a statement. If another process has the lock, try again for up to `BUSY_S`.

        SQLite's own busy handler waits up to 100 ms between two tries. If another process commits without pauses, this
        process would then seldom get the lock. So the waits here are shorter. The method adds up the waits and reads no
        clock.
        """
        waited = 0.0
        while True:
            try:
                found = self.connection.execute(statement).fetchone()
            except sqlite3.OperationalError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_BUSY or waited >= BUSY_S:
                    raise
                pause = random.uniform(0.0002, 0.002 if waited < BUSY_S / 10 else 0.02)
                time.sleep(pause)
                waited += pause
            else:
                return None if found is None else found[0]

    def begin(self, *, is_durable: bool) -> None:
        """Begin a transaction, and take the write lock.

        Args:
            is_durable: If True, the commit returns only when the disk has the data. If False, a power loss may lose the
                data, but the end of this process does not.

        Raises:
            StoreTooNewError: A newer version has changed the schema since this process opened the file.
        """
        if is_durable is not self._is_full_sync:
            self.connection.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
            self._is_full_sync = is_durable
        self._patiently("BEGIN IMMEDIATE")
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise newer_layout(f"sqlite file {self.path!r}", version, SCHEMA_VERSION)

    def commit(self) -> None:
        """Commit the transaction."""
        self.connection.execute("COMMIT")

    def rollback(self) -> None:
        """Undo the transaction, if SQLite has not done so already."""
        with suppress(sqlite3.Error):  # The caller reports the error for which it rolls back.
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")

    def make_room(self) -> None:
        """Merge the WAL into the file and truncate the WAL.

        On a full disk, this gives settlements room to delete messages.
        """
        with suppress(sqlite3.Error):
            self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the connection. If it is the last connection to the file, SQLite merges the WAL into the file."""
        self.connection.close()
        note_closed(self.connection)


def decoded_anyhow(data: bytes) -> str:
    """Decode a text column whose bytes may not be UTF-8. A connection uses this function as its `text_factory`."""
    return data.decode("utf-8", "surrogateescape")


def _opened(path: str, *, may_create: bool) -> sqlite3.Connection:
    if sqlite3.sqlite_version_info < LEAST_SQLITE:
        raise ConfigurationError("SQLite library", sqlite3.sqlite_version, "3.35.0 or newer")
    uri = file_uri(path, may_create=may_create)
    if may_create:
        make_private(path)  # SQLite gives the -wal and -shm files the same mode.
    try:
        return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None, cached_statements=256)
    except sqlite3.Error as error:
        raise open_error(error, path) from error


def file_uri(path: str, *, may_create: bool = False) -> str:
    """Return the URI of the file for `sqlite3.connect`.

    By default, the URI does not create a file. A store has several connections to the file. If somebody deleted the
    file meanwhile, a connection that opens later would otherwise create an empty file.
    """
    return f"{Path(path).as_uri()}?mode={'rwc' if may_create else 'rw'}"


def open_error(error: sqlite3.Error, path: str) -> Exception:
    """Return the error to raise for an SQLite error that kept a file from being opened."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED:
        return StoreMismatchError(
            "sqlite file", repr(path), f"a database that SQLite can read; SQLite reports: {error}"
        )
    hint = "" if os.path.isdir(os.path.dirname(path)) else f"; there is no directory {os.path.dirname(path)!r}"
    return StoreUnavailableError(f"sqlite file {path!r}", failure_of(error, path).reason + hint)


def _sql_of(statement: str) -> str:
    """Return the part of a CREATE statement that SQLite keeps in the file."""
    return statement[statement.index("CREATE ") :].rstrip().removesuffix(";")


def made_by(name: str) -> dict[str, str]:
    """Return the statements of a script, by the name of the object that a statement creates.

    The caller executes them one by one, because `executescript` would first commit the open transaction.

    Args:
        name: `SCHEMA_SCRIPT` or `LIMITS_SCRIPT`.
    """
    script = files("aiodelay.backends.sqlite").joinpath(name).read_text(encoding="utf-8")
    statements: dict[str, str] = {}
    text = ""
    for line in script.splitlines(keepends=True):
        text += line
        if line.rstrip().endswith(";") and sqlite3.complete_statement(text):
            found = _MADE.search(text)
            statements |= {found[1]: text} if found else {}
            text = ""
    return statements
