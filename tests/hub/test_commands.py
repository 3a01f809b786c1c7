"""`quire pull`, `quire list` and `quire rm`, as they are typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.models.hub_cache import HubCache
from tests.hub.files import GGUF, SAFETENSORS
from tests.hub.server import Hub

ROOT = Path(__file__).parents[2]


def listed(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    return {one["model"]: one for one in json.loads(capsys.readouterr().out)}


def test_pull_prints_where_the_model_is(hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]):
    commit = hub.repo("org/tiny", SAFETENSORS)
    assert main(["pull", "org/tiny"]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{cache}/models--org--tiny/snapshots/{commit}\n"
    assert "4 files" in shown.err and "4 fetched and verified" in shown.err
    assert main(["pull", "org/tiny"]) == 0
    assert "all were there" in capsys.readouterr().err
    assert main(["pull", "org/gone"]) == 2
    assert capsys.readouterr().err.startswith("error: model 'org/gone' is not on the hub")


def test_list_names_what_can_be_run_and_rm_removes_it(hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["list"]) == 0
    assert "quire pull ORG/MODEL" in capsys.readouterr().out
    hub.repo("org/tiny", SAFETENSORS)
    hub.repo("org/quants", GGUF)
    for name in ("org/tiny", "org/quants", "org/quants:Q8_0", "org/quants:BF16"):
        assert main(["pull", name]) == 0
    found = listed(capsys)
    assert {name: one["format"] for name, one in found.items()} == {
        "org/quants:BF16": "gguf", "org/quants:Q4_K_M": "gguf", "org/quants:Q8_0": "gguf", "org/tiny": "safetensors",
    }  # fmt: skip
    assert found["org/quants:BF16"]["num_bytes"] == 70_000 and found["org/tiny"]["revision"] == "main"
    assert Path(str(found["org/quants:Q8_0"]["path"])).read_bytes() == GGUF["tiny-Q8_0.gguf"]
    assert main(["list"]) == 0
    assert "org/quants:Q4_K_M  gguf" in capsys.readouterr().out
    assert main(["rm", "org/quants:q8_0", "org/quants:BF16"]) == 0
    assert "removed org/quants:q8_0: 68.4 KiB" in capsys.readouterr().out
    assert listed(capsys).keys() == {"org/quants:Q4_K_M", "org/tiny"}
    assert main(["rm", "org/quants:Q8_0"]) == 2
    assert "hint: it has Q4_K_M" in capsys.readouterr().err
    assert main(["rm", "org/tiny", "org/gone"]) == 2, "found before anything is removed"
    assert main(["rm", "org/tiny", "org/quants:Q4_K_M"]) == 0
    assert not listed(capsys) and not [path for path in cache.rglob("*") if path.is_file()]


def test_an_interrupted_download_is_listed_as_such_and_can_be_removed(
    hub: Hub, cache: Path, capsys: pytest.CaptureFixture[str]
):
    hub.repo("org/tiny", SAFETENSORS)
    blob = HubCache(cache).blob("org/tiny", "a" * 64)
    blob.parent.mkdir(parents=True)
    blob.with_name(blob.name + ".incomplete").write_bytes(b"x" * 5000)
    found = listed(capsys)
    assert (found["org/tiny"]["format"], found["org/tiny"]["num_bytes"]) == ("incomplete", 5000)
    assert main(["rm", "org/tiny"]) == 0 and not listed(capsys)


def test_contents_that_another_file_shows_stay(hub: Hub, capsys: pytest.CaptureFixture[str]):
    hub.repo("org/same", {"a-Q4_K_M.gguf": b"x" * 100, "a-Q8_0.gguf": b"x" * 100})
    for name in ("org/same", "org/same:Q8_0"):
        assert main(["pull", name]) == 0
    assert main(["rm", "org/same:Q8_0"]) == 0
    assert "removed org/same:Q8_0: 0 bytes" in capsys.readouterr().out
    assert Path(str(listed(capsys)["org/same:Q4_K_M"]["path"])).read_bytes() == b"x" * 100


def test_the_commands_import_nothing_heavy(hub: Hub):
    hub.repo("org/tiny", SAFETENSORS)
    code = (
        "import sys\nfrom quire.cli.main import main\n"
        "for argv in (['pull', 'org/tiny'], ['list'], ['rm', 'org/tiny']):\n    assert main(argv) == 0\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'huggingface_hub'}\n"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: []"
