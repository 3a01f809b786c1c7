"""What the upgrade page says of files that another version wrote."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest

from quire.core import request_snapshot
from quire.errors import ConfigError, ValidationError
from quire.flight_recorder import records
from quire.flight_recorder.reader import read_head
from quire.kv_offload import block_file
from quire.kv_offload.faults import BlockFault, FaultKind
from quire.models import packed_file
from quire.server.api.responses import sqlite_backend, store
from quire.server.usage import ledger
from quire.simulator import calibration
from tests.unit.scheduler.harness import make_setup

PAGE = (Path(__file__).parents[3] / "docs/how-to/upgrade.md").read_text()
VERSIONS = {
    "blocks of the KV cache": block_file.FORMAT_VERSION,
    "packed weights": packed_file.FORMAT_VERSION,
    "stored responses": sqlite_backend.SCHEMA_VERSION,
    "one stored response": store.FORMAT,
    "usage by tenant": ledger.SCHEMA_VERSION,
    "flight recordings": records.VERSION,
    "calibrations": calibration.VERSION,
    "snapshots of running requests": request_snapshot.VERSION,
}


def test_the_page_has_the_number_of_every_form():
    rows = dict(re.findall(r"^\| ([\w ]+) \| [^|]+ \| (\d+) \|", PAGE, re.MULTILINE))
    assert rows == {name: str(number) for name, number in VERSIONS.items()}, (
        "say what became of files of the old number"
    )


def test_a_block_of_another_version_is_a_fault_of_that_name(tmp_path: Path):
    payload, name = np.arange(64, dtype=np.uint8), bytes(32)
    path = tmp_path / "block"
    block_file.write_block_file(path, name, name, payload, 1)
    data = bytearray(path.read_bytes())
    data[8] += 1
    path.write_bytes(data)
    with pytest.raises(BlockFault) as caught:
        block_file.read_block_file(path, name, name, payload.copy())
    assert caught.value.kind is FaultKind.OTHER_VERSION


def test_a_snapshot_of_another_version_is_refused_with_the_fix():
    sent = {
        "version": request_snapshot.VERSION + 1, "model": "leaf", "request_id": "a", "prompt_token_ids": [1],
        "output_token_ids": [], "seed": 1, "sampling_params": {},
    }  # fmt: skip
    with pytest.raises(ValidationError, match=r"has version 2") as caught:
        request_snapshot.snapshot_from(sent)
    assert "replicas of one version" in str(caught.value)


def test_a_recording_of_another_version_names_the_version_that_wrote_it(tmp_path: Path):
    head = records.Head(records.VERSION + 1, "9.8.7", "run", 0, 0.0, 0.0, make_setup(), False)
    (tmp_path / "x.qfr").write_bytes(records.MAGIC + records.frame(head))
    with pytest.raises(ValidationError, match=r"format version 3.*\n.*use Quire 9\.8\.7"):
        read_head(tmp_path / "x.qfr")


def test_a_stored_response_of_another_form_is_not_found_and_logged(caplog):
    record = msgspec.json.encode({"response": {"id": "resp_1"}, "input": [], "format": store.FORMAT + 1})
    assert store._checked(record) is None and "has format 2, not 1" in caplog.text


def test_a_ledger_of_another_version_stops_the_start(tmp_path: Path):
    path = tmp_path / "usage.db"
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA application_id = {ledger.APPLICATION_ID}")
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match=r"schema is version 99"):
        ledger._check(str(path), db)
    db.close()
