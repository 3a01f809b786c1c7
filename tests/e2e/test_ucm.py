"""UCMConnector over a fake of UCM in its process: the same bytes, whatever becomes of the process and its files.

`make test-ucm` does this with UCM itself.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.config.kv_transfer import KVTransferConfig
from quire.errors import ConfigError
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.ucm import link
from quire.kv_transfer.ucm.connector import UCMConnector
from tests.e2e.test_connector import BLOCK_SIZE, NUM_PROMPT_TOKENS, Core
from tests.unit.kv_transfer.fake_ucm import SOURCE
from tests.unit.kv_transfer.test_layout import LAYOUT

NUM_LOADED = NUM_PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter that has the fake and what this one has."""
    package = tmp_path / "packages/ucm/integration/vllm"
    package.mkdir(parents=True)
    (package / "ucm_connector.py").write_text(SOURCE)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/packages exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "store").mkdir()
    return python


def config(python: Path, **more: Any) -> dict[str, Any]:
    store = {"store_pipeline": "Posix", "storage_backends": str(python.parent / "store")}
    extra = {
        "side_python": str(python), "side_log": str(python.parent / "log"),
        "ucm_connectors": [{"ucm_connector_name": "UcmPipelineStore", "ucm_connector_config": store}], **more,
    }  # fmt: skip
    return {"kv_connector": "UCMConnector", "kv_connector_extra_config": extra}


def test_an_engine_loads_what_it_computed_whatever_becomes_of_ucm(python, monkeypatch):
    monkeypatch.setattr(link, "RESTART_S", 0.0)
    started = []
    spawn = link.SideProcess._spawn
    monkeypatch.setattr(link.SideProcess, "_spawn", lambda side, path: (started.append(side), spawn(side, path)))
    plain, core = Core(), Core(kv_transfer_config=config(python))
    tokens, logprobs, num_computed = plain.answer(0)
    assert core.answer(0) == (tokens, logprobs, num_computed), (python.parent / "log").read_text()
    assert core.answer(1) == (tokens, logprobs, num_computed - NUM_LOADED)
    assert core.answer(2, cache_salt="another tenant")[2] == num_computed
    for side in started:
        assert side._process is not None
        os.kill(side._process.pid, signal.SIGKILL)
    assert core.answer(3) == (tokens, logprobs, num_computed - NUM_LOADED), "it is started again"
    for path in (python.parent / "store").iterdir():
        path.write_bytes(path.read_bytes()[::-1])
    assert core.answer(4) == (tokens, logprobs, num_computed)
    assert core.counts["ucm_damaged_blocks"] and core.counts["failed_blocks"] and core.counts["ucm_saved_blocks"]
    python.write_text("#!/bin/sh\nexit 1\n")
    for side in started:
        side._end()
    assert core.answer(5, cache_salt="a third one") == (tokens, logprobs, num_computed)
    assert core.answer(6) and core.counts["unsaved_blocks"] and "vllm" not in sys.modules
    for one in (plain, core):
        one.core.shutdown()
        one.core.shutdown()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"side_python": "/nowhere/python"}, "there is no '/nowhere/python'"),
        ({"side_timeout_s": -1}, "side_timeout_s"),
        ({"use_layerwise": True}, "use_layerwise"),
        ({"UCM_CONFIG_FILE": "x.yaml"}, "UCM_CONFIG_FILE"),
        ({"ucm_connectors": []}, "ucm_connectors"),
        ({"ucm_connectors": [{"ucm_connector_config": {"storage_backends": "/nowhere"}}]}, "no directory /nowhere"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(python, extra, message):
    transfer = KVTransferConfig(**config(python, **extra))
    with pytest.raises(ConfigError, match=message):
        UCMConnector(transfer, KVConnectorRole.SCHEDULER, LAYOUT)
