"""`quire inspect` of models that are only on the hub: their descriptions and headers are fetched, and no weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.formats.gguf_file import GGUFFile
from quire.models import skeleton
from quire.models.pull import pull_model
from tests.hub.server import Hub
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import make_gguf
from tests.models.stored_models import SIZES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """Of a sharded model."""
    make_checkpoint("llama", tmp_path / "model", max_shard_size="2MB", vocab_size=20_000, hidden_size=64)
    return {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}


def inspected(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    return main(["inspect", "--json", *argv]), json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_it_says_the_same_as_of_the_downloaded_model(
    hub: Hub, cache: Path, files: dict[str, bytes], ignores_ranges: bool, capsys: pytest.CaptureFixture[str]
):
    hub.repo("org/tiny", files)
    hub.ignores_ranges = ignores_ranges
    status, remote = inspected(capsys, "org/tiny")
    weights = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    assert status == 0 and remote["weights"]["num_bytes"] == weights > 10_000_000
    assert not cache.exists()
    if not ignores_ranges:
        assert sum(one.num_bytes for one in hub.requests if one.is_content) < 2_000_000
    pull_model("org/tiny")
    hub.requests.clear()
    local = inspected(capsys, "org/tiny")[1]
    assert not hub.requests, "what is on the disk is looked at"
    for one in (remote, local):
        for name in ("path", "memory"):
            del one[name]
    assert remote == local


def test_what_would_fail_after_the_download_is_found_before(
    hub: Hub, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
):
    shard = next(name for name in files if name.startswith("model-00002"))
    hub.repo("org/incomplete", {name: data for name, data in files.items() if name != shard})
    status, found = inspected(capsys, "org/incomplete")
    assert status == 1 and "which is missing" in found["problems"][0]["message"]
    config = {**json.loads(files["config.json"]), "architectures": ["NewModelForCausalLM"]}
    hub.repo("org/new", {**files, "config.json": json.dumps(config).encode()})
    assert inspected(capsys, "org/new")[0] == 1
    assert main(["inspect", "org/gone"]) == 2
    assert "is not on the hub" in capsys.readouterr().err


def test_of_a_gguf_file_the_header_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    make_checkpoint("llama3", tmp_path / "checkpoint", **SIZES)
    path = tmp_path / "tiny-Q4_K_M.gguf"
    make_gguf(tmp_path / "checkpoint", path, "Q4_K_M")
    data_begin = min(tensor.offset for tensor in GGUFFile(path).tensors.values())
    monkeypatch.setattr(skeleton, "GGUF_BYTES", data_begin)
    hub.repo("org/quants", {path.name: path.read_bytes(), "README.md": b""})
    status, found = inspected(capsys, "org/quants")
    assert status == 0 and found["weights"]["format"] == "gguf" and "Q4_K" in found["weights"]["dtypes"]
    fetched = sum(one.num_bytes for one in hub.requests if one.is_content)
    assert data_begin < fetched < data_begin + 1000, "with the factors of the rotary embedding"
    assert found["weights"] == inspected(capsys, str(path))[1]["weights"]


def test_no_torch_is_imported_for_it(hub: Hub, files: dict[str, bytes]):
    hub.repo("org/tiny", files)
    code = (
        "import sys\nfrom quire.cli.main import main\nassert main(['inspect', 'org/tiny']) == 0\n"
        "print('heavy:', sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
