"""The example package of plugins, installed as pip leaves a package, and a tiny model of an architecture of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.tiny_model import config_json, write_json, write_tiny_model

ACME = Path(__file__).parent / "acme"


@pytest.fixture(scope="session")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package's modules and its metadata are on the path, of this process and of those that it starts."""
    site = tmp_path_factory.mktemp("site")
    info = site / "acme_quire-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-quire\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text((ACME / "entry_points.txt").read_text())
    added = [str(site), str(ACME)]
    sys.path[:0] = added
    yield
    sys.path[:] = [entry for entry in sys.path if entry not in added]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories by architecture: Quire's Llama and, with the same weights, the package's models."""
    root, found = tmp_path_factory.mktemp("models"), {}
    for name in ("LlamaForCausalLM", "AcmeForCausalLM", "Acme2ForCausalLM", "NobodysForCausalLM"):
        path = write_tiny_model(root / name, root / "marker")
        write_json(path / "config.json", {**config_json(), "architectures": [name]})
        found[name] = str(path)
    return found
