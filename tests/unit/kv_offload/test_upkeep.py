"""`quire cache`: what a directory of blocks holds, which files are damaged, and how it is emptied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.kv_offload.directory import BlockDirectory
from tests.unit.kv_offload.fakes import NAMESPACE, ArrayMemory, key, make_store, num_found, store_blocks

KEYS = [key(number) for number in range(3)]
NAME = NAMESPACE[:16].hex()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for namespace in (NAMESPACE, key(9)):
        memory, store = ArrayMemory(), make_store(tmp_path, namespace=namespace)
        store.start(memory)
        store_blocks(store, memory, [0, 1, 2])
        store.close(10.0)
    return tmp_path


def damage(root: Path) -> Path:
    directory = BlockDirectory(root, NAMESPACE)
    path = directory.path_of(directory.prefix + KEYS[1])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return path


def test_a_directory_is_listed_by_model_and_layout(root, capsys):
    assert main(["cache", "list", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all("3 blocks" in line and "a model" in line for line in lines)
    assert main(["cache", "list", str(root), "--json", "--namespace", NAME[:6]]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["num_blocks"], one["num_bytes"]) for one in listed] == [(NAME, 3, 3 * 1128)]


def test_damaged_files_are_named_and_removed_where_that_is_asked_for(root, capsys):
    path = damage(root)
    assert main(["cache", "verify", str(root)]) == 1
    printed = capsys.readouterr().out
    assert f"{path}: its checksum" in printed and f"{NAME}: 3 blocks, 1 damaged" in printed and path.exists()
    assert main(["cache", "verify", str(root), "--remove"]) == 0 and not path.exists()
    assert main(["cache", "verify", str(root)]) == 0


def test_a_namespace_is_cleared_while_its_neighbour_stays(root, capsys):
    (root / NAME / KEYS[0].hex()[:2] / ".x.1-0.tmp").write_bytes(b"torn")
    assert main(["cache", "clear", str(root), "--namespace", NAME]) == 0
    assert "3.3 KiB removed" in capsys.readouterr().out
    assert len(list(root.rglob("*.kv"))) == 3 and not list(root.rglob("*.tmp"))
    assert main(["cache", "clear", str(root)]) == 0 and not list(root.rglob("*.kv"))
    store = make_store(root)
    store.start(ArrayMemory())
    assert num_found(store, KEYS) == 0
    store.close(10.0)


def test_other_directories_and_unknown_namespaces_are_refused(root, tmp_path_factory, capsys):
    other = tmp_path_factory.mktemp("other")
    assert main(["cache", "clear", str(other)]) == 2
    assert "not a directory of KV-cache blocks" in capsys.readouterr().err
    assert main(["cache", "clear", str(root), "--namespace", "zz"]) == 2
    assert "no namespace begins with" in capsys.readouterr().err
