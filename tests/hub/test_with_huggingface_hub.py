"""The cache is huggingface_hub's: what one program downloads, the other finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from quire.models.hub_cache import HubCache
from quire.models.pull import cached_model, pull_model
from tests.hub.files import SAFETENSORS, WANTED
from tests.hub.server import Hub

PATTERNS = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


def with_the_library(code: str) -> list[str]:
    """Lines that a program with huggingface_hub prints, which reads the environment when it is imported."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_each_finds_what_the_other_has_downloaded(hub: Hub, cache: Path):
    hub.repo("org/theirs", SAFETENSORS)
    hub.repo("org/ours", SAFETENSORS)
    ours = pull_model("org/ours").path
    theirs, found, repos = with_the_library(
        "from huggingface_hub import snapshot_download, scan_cache_dir\n"
        f"print(snapshot_download('org/theirs', allow_patterns={PATTERNS}))\n"
        "print(snapshot_download('org/ours', local_files_only=True))\n"
        "scan = scan_cache_dir()\n"
        "print(sorted((repo.repo_id, repo.size_on_disk, repo.nb_files) for repo in scan.repos), len(scan.warnings))"
    )
    assert Path(found) == ours and Path(theirs) == cached_model("org/theirs")
    assert sorted(HubCache(cache).files("org/theirs", Path(theirs).name)) == WANTED
    size = sum(len(SAFETENSORS[name]) for name in WANTED)
    assert repos == f"{[('org/ours', size, 4), ('org/theirs', size, 4)]} 0"
    hub.requests.clear()
    assert str(pull_model("org/theirs").path) == theirs and not any(one.is_content for one in hub.requests)
    hub.requests.clear()
    (again,) = with_the_library(
        "from huggingface_hub import snapshot_download\n"
        f"print(snapshot_download('org/ours', allow_patterns={PATTERNS}))"
    )
    assert Path(again) == ours and not any(one.is_content for one in hub.requests)
