"""UsageLedger: tokens by day, tenant, key and model in an SQLite file, which outlives the server's process.

Owned by `TokenAccounts`. A thread writes what was added as soon as it can, all of it in one transaction: requests wait
for no disk. What cannot be written is kept, summed up, and tried again. Several servers may write to one file.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigError
from quire.logger import get_logger
from quire.utils.paths import why_no_file

logger = get_logger(__name__)

APPLICATION_ID = 0x51755573
SCHEMA_VERSION = 1
FIELD = "usage_ledger"
LOCK_WAIT_S, LOCK_LOOK_S = 5.0, 0.01
RETRY_S = 1.0
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "generated_tokens")
SCHEMA = f"""
CREATE TABLE usage (
    day TEXT NOT NULL,
    tenant TEXT NOT NULL,
    key TEXT NOT NULL,
    model TEXT NOT NULL,
    {" ".join(f"{name} INTEGER NOT NULL," for name in COUNTS)}
    PRIMARY KEY (day, tenant, key, model)
) WITHOUT ROWID;
"""
ADD = f"INSERT INTO usage VALUES ({', '.join('?' * (4 + len(COUNTS)))}) ON CONFLICT DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in COUNTS
)


class TokenUse(NamedTuple):
    """What requests used.

    Attributes:
        cached_tokens: of the prompt's, those that were found in the prefix cache.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int

    def plus(self, other: TokenUse) -> TokenUse:
        """Both together."""
        return TokenUse(*(a + b for a, b in zip(self, other, strict=True)))


class UsageRow(NamedTuple):
    """One row of the ledger; `key` is the fingerprint of an API key, "" = the server had none."""

    day: str
    tenant: str
    key: str
    model: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int


NOTHING = TokenUse(0, 0, 0, 0)
Account = tuple[str, str, str, str]
"""Day, tenant, key, model."""


class UsageLedger:
    """Adds up what requests used.

    Args:
        path: of the file, made if it does not exist.
        max_days: rows of earlier days are deleted.
        clock: Unix seconds.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, path: str, max_days: int, clock: Callable[[], float] = time.time) -> None:
        self._path, self._max_days, self._clock = path, max_days, clock
        self._db = _open(path)
        self._pending: dict[Account, TokenUse] = {}
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._has_news, self._ends = threading.Event(), False
        self._is_failing = False
        self._last_day = ""
        self._thread = threading.Thread(target=self._run, name="usage ledger", daemon=True)
        self._thread.start()

    def add(self, tenant: str, key: str, model: str, use: TokenUse) -> None:
        """Requests of today; returns at once."""
        account = (_day(self._clock()), tenant, key, model)
        with self._lock:
            self._pending[account] = self._pending.get(account, NOTHING).plus(use)
        self._has_news.set()

    def rows(self, since: str = "", until: str = "9999-12-31", tenant: str | None = None) -> list[UsageRow]:
        """The rows of these days, both included, in order; waits for what was added before.

        Args:
            tenant: None = of all.

        Raises:
            sqlite3.Error: the file cannot be read.
        """
        self._write()
        with self._writing:
            return read_rows(self._db, since, until, tenant)

    def flush(self) -> bool:
        """Write what was added; waits for it. False = it could not be written, and is tried again."""
        return self._write()

    def close(self) -> None:
        """Write what is left; harmless when repeated."""
        self._ends = True
        self._has_news.set()
        self._thread.join()
        self._write()
        if self._pending:
            lost = sum((use.requests for use in self._pending.values()), 0)
            logger.error("usage_ledger %s: the last %d requests could not be written", self._path, lost)
            self._pending = {}
        with self._writing, contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _run(self) -> None:
        while not self._ends:
            self._has_news.wait()
            self._has_news.clear()
            if not self._write() and not self._ends:
                time.sleep(RETRY_S)
                self._has_news.set()

    def _write(self) -> bool:
        """Write what was added; False where it could not be, and is added to what comes."""
        with self._writing:
            with self._lock:
                pending, self._pending = self._pending, {}
            if not pending:
                return True
            try:
                with _transaction(self._db):
                    self._db.executemany(ADD, [(*account, *use) for account, use in pending.items()])
                    self._forget_old()
            except sqlite3.Error as error:
                self._put_back(pending)
                if not self._is_failing:
                    logger.error("usage_ledger %s cannot be written, and is tried again: %s", self._path, error)
                self._is_failing = True
                return False
            if self._is_failing:
                logger.info("usage_ledger %s is written again; nothing was lost", self._path)
            self._is_failing = False
            return True

    def _put_back(self, pending: dict[Account, TokenUse]) -> None:
        with self._lock:
            for account, use in pending.items():
                self._pending[account] = self._pending.get(account, NOTHING).plus(use)

    def _forget_old(self) -> None:
        """Once a day, within a transaction."""
        now_s = self._clock()
        if _day(now_s) != self._last_day:
            self._last_day = _day(now_s)
            self._db.execute("DELETE FROM usage WHERE day < ?", (_day(now_s - 86_400 * self._max_days),))


def read_rows(db: sqlite3.Connection, since: str, until: str, tenant: str | None) -> list[UsageRow]:
    """Rows of an open ledger, as `UsageLedger.rows`."""
    query = "SELECT * FROM usage WHERE day >= ? AND day <= ?" + ("" if tenant is None else " AND tenant = ?")
    values = (since, until) if tenant is None else (since, until, tenant)
    return [UsageRow(*row) for row in db.execute(f"{query} ORDER BY day, tenant, key, model", values)]


def open_to_read(path: str) -> sqlite3.Connection:
    """A ledger that another process may be writing to.

    Raises:
        ConfigError: it is none.
    """
    if not Path(path).is_file():
        raise _unusable(path, "there is no such file", "name the file that the server has as --usage-ledger")
    try:
        db = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, timeout=LOCK_WAIT_S)
        _check(path, db)
    except sqlite3.Error as error:
        raise _unusable(path, str(error)) from None
    return db


def check_ledger(path: str) -> None:
    """Refuse a file that cannot be used; one that does not exist is not made.

    Raises:
        ConfigError: so it is.
    """
    file = Path(path)
    why = why_no_file(file)
    if why is not None:
        raise _unusable(path, why)
    if file.exists():
        open_to_read(path).close()


def _day(now_s: float) -> str:
    """In UTC."""
    return (datetime.fromtimestamp(0, timezone.utc) + timedelta(seconds=now_s)).strftime("%Y-%m-%d")


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Takes the right to write at its begin, so that another server's transaction is waited for, not run into."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise


def _open(path: str) -> sqlite3.Connection:
    """The file, made if needed, in the form that this version reads and writes."""
    try:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        db = sqlite3.connect(path, timeout=LOCK_WAIT_S, check_same_thread=False, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, str(error)) from None
    try:
        _write_ahead(db)
        db.execute("PRAGMA synchronous = NORMAL")
        with _transaction(db):  # of several servers that begin at once, one makes the table
            (num_tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if not num_tables:
                db.execute(SCHEMA)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        _check(path, db)
    except sqlite3.Error as error:
        db.close()
        raise _unusable(path, str(error)) from None
    except ConfigError:
        db.close()
        raise
    return db


def _write_ahead(db: sqlite3.Connection) -> None:
    """Keep a log of what is written: readers and writers do not block each other.

    To change that, SQLite needs the file for itself, and does not wait for others that begin at the same time.
    """
    until_s = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > until_s:
                raise
        time.sleep(LOCK_LOOK_S)


def _check(path: str, db: sqlite3.Connection) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise _unusable(path, "it is not a usage ledger")
    if version != SCHEMA_VERSION:
        raise _unusable(path, f"its schema is version {version}, this version of Quire writes {SCHEMA_VERSION}")


def _unusable(path: str, why: str, hint: str = "use the path of a file that Quire can create") -> ConfigError:
    return ConfigError(f"usage_ledger {path} cannot be used: {why}", hint=hint, field=FIELD)
