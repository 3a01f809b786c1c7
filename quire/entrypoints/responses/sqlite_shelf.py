"""SqliteShelf: responses in a file, which outlive the server's process. Owned by `ResponseStore`.

The file is this user's alone. Its journal is written ahead (WAL): a process that is killed loses nothing that was put,
a machine that loses its power at most the last of it.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import suppress
from pathlib import Path

from quire.entrypoints.responses.store import Key, Shares, ShelfError, ShelfLimits
from quire.errors import ConfigError
from quire.logger import get_logger

logger = get_logger(__name__)

APPLICATION_ID = 0x51756972
SCHEMA_VERSION = 1
FIELD = "response_store"
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


class SqliteShelf:
    """Keeps records in a file.

    Args:
        path: of the file, made if it does not exist.
        limits: of what is kept.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: str, limits: ShelfLimits) -> None:
        self._limits = limits
        self._db = _open(path)
        self._shares, self._last_use = Shares(), 0
        self._count()

    def put(self, key: Key, record: bytes, now_s: float) -> None:
        """As `Shelf.put`."""
        self._limits.check(record)
        try:
            with self._db:
                self._delete(key)
                self._db.execute(
                    "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?)", (*key, now_s, self._use(), len(record), record)
                )
                self._shares.add(key[0], len(record))
                self._make_room(now_s)
        except sqlite3.Error as error:  # nothing of it was done
            self._count()
            raise ShelfError(str(error)) from error

    def get(self, key: Key, now_s: float) -> bytes | None:
        """As `Shelf.get`."""
        row = self._db.execute("SELECT record, created_s FROM responses WHERE tenant = ? AND id = ?", key).fetchone()
        if row is None or self._limits.is_old(row[1], now_s):
            return None
        try:
            with self._db:
                self._db.execute("UPDATE responses SET used = ? WHERE tenant = ? AND id = ?", (self._use(), *key))
        except sqlite3.Error as error:  # it can be read all the same
            logger.warning("the use of a response could not be noted: %s", error)
        return bytes(row[0])

    def delete(self, key: Key) -> bool:
        """As `Shelf.delete`."""
        with self._db:
            return self._delete(key)

    def close(self) -> None:
        """As `Shelf.close`."""
        self._db.close()

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
            (name,) = self._db.execute(oldest, (largest,)).fetchone()
            self._delete((largest, name))

    def _count(self) -> None:
        """Learn from the file what there is."""
        self._shares = Shares()
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
        db = sqlite3.connect(path, check_same_thread=False)
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
            raise _unusable(path, "it is another program's database")
        elif version != SCHEMA_VERSION:
            raise _unusable(path, f"its schema is version {version}, this version of Quire writes {SCHEMA_VERSION}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        return db
    except sqlite3.Error as error:
        db.close()
        raise _unusable(path, str(error)) from None
    except ConfigError:
        db.close()
        raise


def check_path(path: str) -> None:
    """Refuse a path that no file can be made at, before anything costly is started.

    Raises:
        ConfigError: the directory does not exist or cannot be written to, or the path is no file.
    """
    file = Path(path)
    if file.exists() and not file.is_file():
        raise _unusable(path, "it is no file")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise _unusable(path, "this user cannot write there")


def _unusable(path: str, why: str) -> ConfigError:
    return ConfigError(
        f"response_store {path} cannot be used: {why}",
        hint="give the path of a file that Quire may make, memory, or none", field=FIELD,
    )  # fmt: skip
