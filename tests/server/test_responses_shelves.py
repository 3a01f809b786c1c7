"""The shelves of responses, in memory and in a file: what is kept, what goes, what outlives a kill."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.server import ResponsesConfig, ServerConfig
from quire.errors import ConfigError
from quire.server.api.responses.keeping import check_store
from quire.server.api.responses.sqlite_backend import SqliteBackend
from quire.server.api.responses.store import (
    BrokenChainError,
    MemoryShelf,
    ResponseStore,
    ShelfError,
    ShelfLimits,
    StoreBackend,
    StoredResponse,
)
from quire.server.checks import check_files

LIMITS = ShelfLimits(max_responses=4, max_bytes=4000, max_age_s=100)


@pytest.fixture(params=["memory", "file"])
def make(request, tmp_path) -> Callable[..., StoreBackend]:
    def make(limits: ShelfLimits = LIMITS) -> StoreBackend:
        return MemoryShelf(limits) if request.param == "memory" else SqliteBackend(str(tmp_path / "db"), limits)

    return make


def names(shelf: StoreBackend, tenant: str = "red", now_s: float = 0.0) -> str:
    return "".join(one for one in "abcdefgh" if shelf.get((tenant, one), now_s) is not None)


def test_what_was_put_is_found_by_its_tenant_until_it_is_deleted(make):
    shelf = make()
    shelf.put(("red", "a"), b"1", 0.0)
    assert shelf.get(("red", "a"), 0.0) == b"1" and shelf.get(("blue", "a"), 0.0) is None
    shelf.put(("red", "a"), b"2", 0.0)
    assert shelf.get(("red", "a"), 0.0) == b"2"
    assert not shelf.delete(("blue", "a")) and shelf.delete(("red", "a")) and not shelf.delete(("red", "a"))
    assert shelf.get(("red", "a"), 0.0) is None
    shelf.close()


def test_the_longest_unused_goes_when_there_are_too_many(make):
    shelf = make()
    for name in "abcd":
        shelf.put(("red", name), b"x", 0.0)
    shelf.get(("red", "a"), 0.0)
    shelf.put(("red", "e"), b"x", 0.0)
    assert names(shelf) == "acde"


def test_it_goes_when_there_are_too_many_bytes_too(make):
    shelf = make()
    shelf.put(("red", "a"), b"x" * 1500, 0.0)
    shelf.put(("red", "b"), b"x" * 1500, 0.0)
    shelf.put(("red", "c"), b"x" * 1500, 0.0)
    assert names(shelf) == "bc"
    with pytest.raises(ShelfError, match="response_store_max_bytes"):
        shelf.put(("red", "d"), b"x" * 4001, 0.0)
    assert names(shelf) == "bc", "what does not fit by itself pushes nothing out"


def test_the_tenant_that_has_most_gives_way(make):
    shelf = make()
    shelf.put(("blue", "a"), b"x", 0.0)
    for name in "abcdefgh":
        shelf.put(("red", name), b"x" * 100, 0.0)
    assert names(shelf, "blue") == "a" and names(shelf) == "fgh"


def test_what_is_too_old_is_not_found(make):
    shelf = make()
    shelf.put(("red", "a"), b"x", 0.0)
    shelf.put(("red", "b"), b"x", 90.0)
    assert names(shelf, now_s=100.0) == "ab" and names(shelf, now_s=101.0) == "b"
    shelf.put(("red", "c"), b"x", 191.0)
    assert names(shelf, now_s=150.0).endswith("c") and "a" not in names(shelf, now_s=0.0)


def test_a_file_is_counted_again_when_it_is_opened(tmp_path):
    path = str(tmp_path / "db")
    first = SqliteBackend(path, LIMITS)
    for name in "abc":
        first.put(("red", name), b"x", 0.0)
    first.get(("red", "a"), 0.0)
    first.close()
    again = SqliteBackend(path, LIMITS)
    for name in "de":
        again.put(("red", name), b"x", 0.0)
    assert names(again) == "acde"
    again.close()
    smaller = SqliteBackend(path, ShelfLimits(2, 4000, 0))
    smaller.put(("red", "f"), b"x", 0.0)
    assert len(names(smaller)) == 2
    smaller.close()


def test_what_was_put_outlives_a_kill(tmp_path):
    path = tmp_path / "db"
    code = (
        "import sys, time\n"
        "from quire.server.api.responses.sqlite_backend import SqliteBackend\n"
        "from quire.server.api.responses.store import ShelfLimits\n"
        f"shelf = SqliteBackend({str(path)!r}, ShelfLimits(1000, 1 << 20, 0))\n"
        "for number in range(1000):\n"
        "    shelf.put(('red', str(number)), b'x' * number, 0.0)\n"
        "    print(number, flush=True)\n"
    )
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        for _ in range(20):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        last = int((process.stdout.read().split() or [last])[-1])
    shelf = SqliteBackend(str(path), ShelfLimits(1000, 1 << 20, 0))
    assert all(shelf.get(("red", str(number)), 0.0) == b"x" * number for number in range(last + 1))
    shelf.close()


def test_a_file_of_another_program_or_another_version_is_refused(tmp_path):
    other = tmp_path / "other"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE notes (text TEXT)")
    db.close()
    with pytest.raises(ConfigError, match="another program"):
        SqliteBackend(str(other), LIMITS)
    newer = tmp_path / "newer"
    SqliteBackend(str(newer), LIMITS).close()
    with sqlite3.connect(newer) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        SqliteBackend(str(newer), LIMITS)


def record(name: str, previous: str | None = None) -> StoredResponse:
    item = {"id": "msg_1", "type": "message", "role": "user", "content": [{"type": "input_text", "text": name}]}
    return StoredResponse(response={"id": name, "previous_response_id": previous}, input=[item])


def run(work: Callable[[ResponseStore], Any], shelf: StoreBackend) -> Any:
    async def main() -> Any:
        store = ResponseStore(shelf, clock=lambda: 0.0)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(main())


def test_a_chain_is_read_from_its_first_turn_and_is_bounded(make):
    async def work(store: ResponseStore) -> None:
        for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("y", "gone")):
            await store.put("red", record(name, previous))
        assert [one.response_id for one in await store.chain("red", "c", 3, 4000)] == ["a", "b", "c"]
        for response_id, max_turns, max_bytes, broken, is_long in (
            ("c", 2, 4000, "a", True), ("c", 3, 200, "b", True), ("y", 3, 4000, "gone", False),
            ("z", 3, 4000, "z", False),
        ):  # fmt: skip
            with pytest.raises(BrokenChainError) as caught:
                await store.chain("red", response_id, max_turns, max_bytes)
            assert (caught.value.response_id, caught.value.is_too_long) == (broken, is_long)
        with pytest.raises(BrokenChainError):
            await store.chain("blue", "c", 3, 4000)

    run(work, make())


@pytest.mark.parametrize(
    "data",
    [
        b"\xff", b"{}", b'{"response": {}, "input": []}', b'{"response": {"id": "a"}, "input": [], "format": 2}',
        b"[" * 9999,
    ],
    ids=["bytes", "empty", "no id", "later format", "deep"],
)  # fmt: skip
def test_a_record_that_was_not_made_by_us_is_not_found(make, data):
    async def work(store: ResponseStore) -> None:
        assert await store.get("red", "a") is None

    shelf = make(ShelfLimits(10, 1 << 20, 0))
    shelf.put(("red", "a"), data, 0.0)
    run(work, shelf)


def counts(shelf: SqliteBackend) -> tuple[int, int]:
    return shelf._shares.num_responses, shelf._shares.num_bytes


def damage(path: Path) -> None:
    """Overwrite the pages of the tables, and leave the file's head."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))


def filled(path: Path, num_records: int = 50) -> SqliteBackend:
    shelf = SqliteBackend(str(path), ShelfLimits(1000, 1 << 20, 0))
    for number in range(num_records):
        shelf.put(("red", str(number)), b"x" * 500, 0.0)
    return shelf


@pytest.mark.parametrize("how", ["pages", "cut", "text"])
def test_a_damaged_file_is_refused_by_name(tmp_path, how):
    path = tmp_path / "db"
    filled(path).close()
    if how == "pages":
        damage(path)
    elif how == "cut":
        os.truncate(path, 4096 + 100)
    else:
        path.write_bytes(b"these are notes, and not a database " * 200)
    with pytest.raises(ConfigError, match="response_store .* cannot be used") as caught:
        check_files(ServerConfig(responses=ResponsesConfig(response_store=str(path))), "fcfs")  # before the engine
    assert caught.value.hint and caught.value.field == "response_store"


def test_a_file_that_is_damaged_while_it_is_used_is_a_shelf_error_and_counts_stay(tmp_path):
    path = tmp_path / "db"
    filled(path).close()
    shelf = SqliteBackend(str(path), ShelfLimits(1000, 1 << 20, 0))
    before = counts(shelf)
    shelf._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damage(path)
    shelf._db.execute("PRAGMA shrink_memory")
    for _ in range(3):
        for act in (
            lambda: shelf.put(("red", "new"), b"y" * 500, 0.0), lambda: shelf.get(("red", "7"), 0.0),
            lambda: shelf.delete(("red", "7")),
        ):  # fmt: skip
            with pytest.raises(ShelfError):
                act()
    assert counts(shelf) == before
    shelf.close()


def test_a_full_disk_loses_no_counts_and_what_was_kept_is_read_on(tmp_path):
    shelf = filled(tmp_path / "db")
    (num_pages,) = shelf._db.execute("PRAGMA page_count").fetchone()
    shelf._db.execute(f"PRAGMA max_page_count = {num_pages}")
    with pytest.raises(ShelfError, match="full"):
        shelf.put(("red", "large"), b"y" * 100_000, 0.0)
    assert counts(shelf) == (50, 50 * 500)
    shelf._db.execute("PRAGMA query_only = ON")  # as when not even the journal can grow
    with pytest.raises(ShelfError):
        shelf.delete(("red", "7"))
    assert counts(shelf) == (50, 50 * 500)
    assert shelf.get(("red", "7"), 0.0) == b"x" * 500
    shelf._db.execute("PRAGMA query_only = OFF")
    assert shelf.delete(("red", "7")) and counts(shelf) == (49, 49 * 500)
    shelf.close()


def test_reads_go_on_while_somebody_holds_the_files_lock(tmp_path):
    path = tmp_path / "db"
    shelf = filled(path)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert shelf.get(("red", "7"), 0.0) == b"x" * 500
    with pytest.raises(ShelfError, match="locked"):
        shelf.put(("red", "new"), b"x", 0.0)
    other.execute("ROLLBACK")
    other.close()
    shelf.put(("red", "new"), b"x", 0.0)
    assert counts(shelf) == (51, 50 * 500 + 1)
    shelf.close()


def test_a_second_server_on_the_file_is_refused_until_the_first_has_ended_however_it_ended(tmp_path):
    path = str(tmp_path / "db")
    code = (
        "import sys\n"
        "from quire.server.api.responses.sqlite_backend import SqliteBackend\n"
        "from quire.server.api.responses.store import ShelfLimits\n"
        f"shelf = SqliteBackend({path!r}, ShelfLimits(1000, 1 << 20, 0))\n"
        "shelf.put(('red', 'a'), b'x', 0.0)\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"open\n"
        for refused in (lambda: SqliteBackend(path, LIMITS), lambda: check_store(ResponsesConfig(response_store=path))):
            with pytest.raises(ConfigError, match="another server uses it") as caught:
                refused()
            assert "separate file" in (caught.value.hint or "")
        first.send_signal(signal.SIGKILL)
    shelf = SqliteBackend(path, LIMITS)
    assert names(shelf) == "a"
    shelf.close()


def test_checking_a_file_that_does_not_exist_makes_none(tmp_path):
    check_store(ResponsesConfig(response_store=str(tmp_path / "db")))
    assert list(tmp_path.iterdir()) == []
