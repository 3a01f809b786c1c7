"""SqliteBackend: responses in a file, which outlive the server's process. Owned by `ResponseStore`.

The file is this user's alone, and this process's: `FileClaim`. Its journal is written ahead (WAL): a process that is
killed loses nothing that was put, a machine that loses its power at most the last of it. What SQLite cannot do is a
`ShelfError`, and leaves the counts as they were.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quire.errors import ConfigError
from quire.logger import get_logger
from quire.server.api.responses.store import Key, ShelfError, ShelfLimits, TenantUsage
from quire.utils.paths import why_no_file

logger = get_logger(__name__)

APPLICATION_ID = 0x51756972
SCHEMA_VERSION = 1
FIELD = "response_store"
LOCK_WAIT_S = 0.1
"""For somebody who looks into the file; the thread of all reads waits no longer."""
UNREADABLE = (sqlite3.Error, TypeError, ValueError, OverflowError)
"""What a damaged file leads to."""
USABLE = "use memory, none, or the path of a file that Quire can create"
DAMAGED = "move it away to create a new one; sqlite3's .recover may restore its content"
SCHEMA = """
CREATE TABLE responses (
    tenant TEXT NOT NULL,
    id TEXT NOT NULL,
    created_s REAL NOT NULL,
    used INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    record BLOB NOT NULL,
    PRIMARY KEY (tenant, id)
);
CREATE INDEX responses_by_use ON responses (tenant, used);
CREATE INDEX responses_by_age ON responses (created_s);
"""


class SqliteBackend:
    """Keeps records in a file.

    Args:
        path: of the file, made if it does not exist.
        limits: of what is kept.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: str, limits: ShelfLimits) -> None:
        self._limits = limits
        self._claim = FileClaim(path)
        try:
            self._db = _open(path)
        except ConfigError:
            self._claim.end()
            raise
        self._shares, self._last_use = TenantUsage(), 0
        try:
            self._count()
        except UNREADABLE as error:
            self.close()
            raise _unusable(path, str(error)) from None

    def put(self, key: Key, record: bytes, now_s: float) -> None:
        """As `StoreBackend.put`."""
        self._limits.check(record)
        with self._change():
            self._delete(key)
            self._db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", (*key, now_s, self._use(), len(record), record)
            )
            self._shares.add(key[0], len(record))
            self._make_room(now_s)

    def get(self, key: Key, now_s: float) -> bytes | None:
        """As `StoreBackend.get`."""
        query = "SELECT record, created_s FROM responses WHERE tenant = ? AND id = ?"
        try:
            row = self._db.execute(query, key).fetchone()
            if row is None or self._limits.is_old(row[1], now_s):
                return None
            record = bytes(row[0])
        except UNREADABLE as error:
            raise ShelfError(str(error)) from error
        try:
            with self._db:
                self._db.execute("UPDATE responses SET used = ? WHERE tenant = ? AND id = ?", (self._use(), *key))
        except sqlite3.Error as error:  # it can be read all the same
            logger.warning("the last use of a response could not be recorded: %s", error)
        return record

    def delete(self, key: Key) -> bool:
        """As `StoreBackend.delete`."""
        with self._change():
            return self._delete(key)

    def close(self) -> None:
        """As `StoreBackend.close`."""
        with suppress(sqlite3.Error):
            self._db.close()
        self._claim.end()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """A transaction; one that fails changes neither the file nor the counts."""
        before = self._shares.copy()
        try:
            with self._db:
                yield
        except UNREADABLE as error:
            self._shares = before
            raise ShelfError(str(error)) from error

    def _delete(self, key: Key) -> bool:
        row = self._db.execute("SELECT num_bytes FROM responses WHERE tenant = ? AND id = ?", key).fetchone()
        if row is None:
            return False
        self._db.execute("DELETE FROM responses WHERE tenant = ? AND id = ?", key)
        self._shares.remove(key[0], int(row[0]))
        return True

    def _make_room(self, now_s: float) -> None:
        """Forget what is too old, then what those who have most have not used for longest."""
        limits = self._limits
        if limits.max_age_s:
            old = "SELECT tenant, id FROM responses WHERE created_s < ?"
            for tenant, name in self._db.execute(old, (now_s - limits.max_age_s,)).fetchall():
                self._delete((tenant, name))
        oldest = "SELECT id FROM responses WHERE tenant = ? ORDER BY used LIMIT 1"
        while self._shares.is_over(limits):
            largest = self._shares.largest()
            row = self._db.execute(oldest, (largest,)).fetchone()
            if row is None:  # somebody else has deleted it from the file
                self._count()
                continue
            self._delete((largest, row[0]))

    def _count(self) -> None:
        """Learn from the file what there is."""
        self._shares = TenantUsage()
        counts = "SELECT tenant, SUM(num_bytes), COUNT(*), MAX(used) FROM responses GROUP BY tenant"
        for tenant, num_bytes, num_responses, used in self._db.execute(counts).fetchall():
            self._shares.add(tenant, num_bytes, num_responses)
            self._last_use = max(self._last_use, used)

    def _use(self) -> int:
        """Later uses have greater numbers."""
        self._last_use += 1
        return self._last_use


def _open(path: str) -> sqlite3.Connection:
    """The file, in the form that this version reads and writes."""
    try:
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        db = sqlite3.connect(path, timeout=LOCK_WAIT_S, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, str(error)) from None
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        (num_tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
        if not num_tables and not application:
            with db:
                db.executescript(
                    f"BEGIN; {SCHEMA} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
                )
        elif application != APPLICATION_ID:
            raise _unusable(path, "it is a database of another program")
        elif version != SCHEMA_VERSION:
            raise _unusable(path, f"its schema is version {version}, this version of Quire writes {SCHEMA_VERSION}")
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise _unusable(path, f"it is damaged: {' '.join(str(verdict).split())}", DAMAGED)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        return db
    except sqlite3.Error as error:
        db.close()
        raise _unusable(path, str(error), DAMAGED if type(error) is sqlite3.DatabaseError else USABLE) from None
    except ConfigError:
        db.close()
        raise


class FileClaim:
    """That this process alone uses a file, until `end` or the process's end, however that comes.

    A lock of the operating system on a file of its own beside it, so that SQLite's locks stay out of it.

    Raises:
        ConfigError: another process uses it, or the directory cannot be written to.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        try:
            descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(path, f"its lock file cannot be created: {error.strerror}") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise _unusable(
                path, "another server uses it", "use a separate file for each server, or stop the other"
            ) from None
        self._descriptor = descriptor

    def end(self) -> None:
        """Give it up; harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def check_path(path: str, limits: ShelfLimits) -> None:
    """Refuse a file that cannot be used, before anything costly is started; one that does not exist is not made.

    Raises:
        ConfigError: so it is.
    """
    file = Path(path)
    why = why_no_file(file)
    if why is not None:
        raise _unusable(path, why)
    if file.exists():
        SqliteBackend(path, limits).close()


def _unusable(path: str, why: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"response_store {path} cannot be used: {why}", hint=hint or USABLE, field=FIELD)
