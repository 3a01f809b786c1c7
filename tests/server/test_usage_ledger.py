"""Tokens by tenant: counters of /metrics, the ledger, `/v1/usage` and `quire usage`."""

from __future__ import annotations

import csv
import hashlib
import json
import sqlite3
import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client import generate_latest

from quire.cli import main as cli
from quire.errors import ConfigError
from quire.metrics.server_metrics import MAX_SHOWN_TENANTS, OTHER_TENANTS, ServerMetrics
from quire.server.usage.ledger import TokenUse, UsageLedger, UsageRow, check_ledger, open_to_read, read_rows
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, events, post
from tests.server.test_safety import bearer

DAY_S = 86_400.0
NOON = 20_000 * DAY_S + DAY_S / 2  # 2024-10-04
KEYS = """\
tenants:
  ops: {keys: [operator-key-1], operator: true}
  red: {keys: [red-key-1234, red-key-5678]}
"""
ONE = TokenUse(1, 10, 4, 7)


def fingerprint(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def test_each_request_is_counted_once_whether_it_ends_streams_or_is_left(tmp_path: Path, capsys):
    (tmp_path / "keys.yaml").write_text(KEYS)
    path = str(tmp_path / "usage.db")
    with RunningServer(ScriptedEngine(), api_key_file=str(tmp_path / "keys.yaml"), usage_ledger=path) as server:
        red, other, ops = (bearer(key) for key in ("red-key-1234", "red-key-5678", "operator-key-1"))
        post(server, CHAT, {**HELLO, "max_tokens": 4}, headers=red)
        events(post(server, CHAT, {**HELLO, "max_tokens": 6, "stream": True, "n": 2}, headers=red))
        post(server, "/v1/completions", {"prompt": [[7] * 10, [8] * 6], "max_tokens": 5}, headers=other)
        assert post(server, CHAT, {**HELLO, "max_tokens": -4}, headers=other).status_code == 400
        prompt = len(server.engine.prompts[0])
        stream = {"prompt": [7] * 10, "max_tokens": 2000, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=stream, headers=ops) as left:
            next(left.iter_lines())
        server.wait_until(lambda: not server.engine.live and not server.state.running)
        rows = [UsageRow(**row) for row in httpx.get(f"{server.url}/v1/usage", headers=ops).json()["data"]]
        counts = {(row.tenant, row.key): row[4:] for row in rows}
        assert {row.model for row in rows} == {"leaf"} and len({row.day for row in rows}) == 1
        assert counts["red", fingerprint("red-key-1234")] == (2, 2 * prompt, 2 * (prompt // 2), 4 + 12)
        assert counts["red", fingerprint("red-key-5678")] == (2, 16, 8, 10)
        requests, prompt_tokens, _, generated = counts["ops", fingerprint("operator-key-1")]
        assert (requests, prompt_tokens) == (1, 10) and 1 <= generated < 2000
        page = httpx.get(f"{server.url}/metrics", headers=ops).text
        assert 'quire:tenant_requests_total{tenant="red"} 4.0' in page
        assert f'quire:tenant_prompt_tokens_total{{tenant="red"}} {2.0 * prompt + 16}' in page

        # Tenants see themselves alone, keys are shown by their fingerprint; the file can be read meanwhile.
        assert httpx.get(f"{server.url}/v1/usage?tenant=ops", headers=red).status_code == 403
        own = httpx.get(f"{server.url}/v1/usage?tenant=red&format=csv", headers=red)
        lines = list(csv.DictReader(own.text.splitlines()))
        assert {line["tenant"] for line in lines} == {"red"} and "red-key" not in own.text
        assert cli.main(["usage", path, "--format", "json", "--tenant", "red"]) == 0
        assert json.loads(capsys.readouterr().out)["total"]["requests"] == 4
        assert cli.main(["usage", "--url", server.url, "--api-key", "operator-key-1", "--format", "csv"]) == 0
        assert len(capsys.readouterr().out.splitlines()) == 4
        for query, field in (("since=yesterday", "since"), ("format=xml", "format"), ("untill=2026-01-01", "'until'")):
            refused = httpx.get(f"{server.url}/v1/usage?{query}", headers=ops)
            assert refused.status_code == 400 and field in refused.json()["error"]["message"]
            assert refused.json()["error"]["param"] == query.partition("=")[0]
    assert cli.main(["usage", path, "--since", "2024-13-01"]) == 2
    assert cli.main(["usage", path]) == 0 and "fingerprint" not in capsys.readouterr().out


def test_a_server_without_a_ledger_says_how_to_have_one(server):
    answer = httpx.get(f"{server.url}/v1/usage")
    assert answer.status_code == 404 and "--usage-ledger" in answer.json()["error"]["message"]


def test_counts_go_on_in_the_same_file_and_old_days_are_deleted(tmp_path: Path):
    path, now = str(tmp_path / "usage.db"), NOON
    for day in range(4):
        ledger = UsageLedger(path, 2, clock=lambda: now)  # noqa: B023 (closed before the next)
        for _ in range(3):
            ledger.add("red", "", "leaf", ONE)
        found = ledger.rows()
        ledger.close()
        assert found[-1][1:] == ("red", "", "leaf", 3, 30, 12, 21) and len(found) == min(day + 1, 3)
        now += DAY_S
    assert (tmp_path / "usage.db").stat().st_mode & 0o077 == 0
    db = open_to_read(path)
    assert [row.day for row in read_rows(db, "2024-10-07", "2024-10-31", "red")] == ["2024-10-07"]
    db.close()


def test_several_servers_count_in_one_file_and_none_of_them_loses_any(tmp_path: Path):
    ledgers = [UsageLedger(str(tmp_path / "usage.db"), 400, clock=lambda: NOON) for _ in range(3)]

    def add(ledger: UsageLedger) -> None:
        for number in range(200):
            ledger.add(f"tenant-{number % 3}", "", "leaf", ONE)

    threads = [threading.Thread(target=add, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for ledger in ledgers[:-1]:
        ledger.close()
    assert sum(row.requests for row in ledgers[-1].rows()) == 600
    ledgers[-1].close()


def test_a_file_that_is_in_use_while_it_is_made_is_waited_for(tmp_path: Path):
    path = str(tmp_path / "usage.db")
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    end = threading.Timer(0.2, other.execute, ("ROLLBACK",))
    end.start()
    UsageLedger(path, 400, clock=lambda: NOON).close()
    end.join()
    other.close()


def test_what_cannot_be_written_is_tried_again(tmp_path: Path, caplog):
    path = str(tmp_path / "usage.db")
    ledger = UsageLedger(path, 400, clock=lambda: NOON)
    ledger.rows()
    ledger._db.execute("PRAGMA busy_timeout = 1")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    ledger.add("red", "", "leaf", ONE)
    assert not ledger._write()
    ledger.add("red", "", "leaf", ONE)
    other.execute("ROLLBACK")
    other.close()
    assert ledger.rows()[0].requests == 2 and "is tried again" in caplog.text
    ledger.close()


def test_files_of_others_are_refused(tmp_path: Path):
    (tmp_path / "text").write_text("no database, but long enough to be looked at as one " * 20)
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE something (a)")
    other.commit()
    other.close()
    for name in ("text", "other.db"):
        for use in (check_ledger, open_to_read, lambda path: UsageLedger(path, 400)):
            with pytest.raises(ConfigError, match="cannot be used") as error:
                use(str(tmp_path / name))
            assert error.value.field == "usage_ledger"
    with pytest.raises(ConfigError, match="no such file"):
        open_to_read(str(tmp_path / "missing.db"))
    check_ledger(str(tmp_path / "missing.db"))


def test_series_of_tenants_are_bounded():
    metrics = ServerMetrics()
    for number in range(MAX_SHOWN_TENANTS + 10):
        metrics.record_tenant(f"tenant-{number}", *ONE)
    page = generate_latest(metrics.registry).decode()
    assert page.count("quire:tenant_requests_total{") == MAX_SHOWN_TENANTS + 1
    assert f'quire:tenant_prompt_tokens_total{{tenant="{OTHER_TENANTS}"}} 100.0' in page
