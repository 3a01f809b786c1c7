"""Blocks in files: what is read is what was written, or it is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.kv_transfer.block_files import DamagedBlockError, SafetensorsFiles
from tests.unit.kv_transfer.test_layout import LAYOUT

NAME, OTHER = bytes(range(32)), bytes(range(1, 33))
BLOCK = [np.arange(24, dtype=np.uint8).reshape(1, 24), np.arange(7, dtype=np.uint8).reshape(1, 7)]
SHAPES = [part.shape for part in BLOCK]


@pytest.fixture
def files(tmp_path: Path) -> SafetensorsFiles:
    files = SafetensorsFiles(tmp_path / "blocks", LAYOUT)
    files.store(NAME, BLOCK)
    return files


def only(files: SafetensorsFiles) -> Path:
    (path,) = files.directory.glob("*.safetensors")
    return path


def test_a_block_is_read_as_it_was_stored_by_us_and_by_the_safetensors_library(files, tmp_path):
    again = SafetensorsFiles(tmp_path / "blocks", LAYOUT)
    assert again.num_first([NAME, OTHER, NAME]) == 1
    for part, expected in zip(again.load(NAME, SHAPES), BLOCK, strict=True):
        assert np.array_equal(part, expected)
    safetensors = pytest.importorskip("safetensors.numpy")
    tensors = safetensors.load_file(only(files))
    assert [np.array_equal(tensors[str(i)], part) for i, part in enumerate(BLOCK)] == [True, True]
    assert (files.directory.stat().st_mode & 0o77) == 0


def test_every_changed_byte_of_the_contents_and_every_cut_is_noticed(files):
    path = only(files)
    whole = path.read_bytes()
    start = len(whole) - sum(part.nbytes for part in BLOCK)
    for position in range(start, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(DamagedBlockError):
            files.load(NAME, SHAPES)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedBlockError):
            files.load(NAME, SHAPES)


@pytest.mark.parametrize("header", [b"[" * 4000, b"\xff\xfe", b"{}", b"[]", b'{"__metadata__": 3}'])
def test_a_header_that_is_not_one_is_noticed(files, header):
    path = only(files)
    data = path.read_bytes()[-31:]
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(DamagedBlockError):
        files.load(NAME, SHAPES)
    path.write_bytes(b"\xff" * 8 + data)
    with pytest.raises(DamagedBlockError, match="header"):
        files.load(NAME, SHAPES)


def test_a_file_under_the_name_of_another_block_is_noticed(files):
    path = only(files)
    path.with_name(f"{OTHER.hex()}.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(DamagedBlockError, match="another block"):
        files.load(OTHER, SHAPES)


def test_another_layout_has_a_directory_of_its_own_and_none_takes_the_place_of_this_one(files, tmp_path):
    other = dataclasses.replace(LAYOUT, model="cd" * 32)
    assert SafetensorsFiles(tmp_path / "blocks", other).num_first([NAME]) == 0
    (files.directory / "layout.json").write_text(other.to_json())
    with pytest.raises(ConfigError, match="have another layout .*model: "):
        SafetensorsFiles(tmp_path / "blocks", LAYOUT)


def test_a_place_that_is_not_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="shared_storage_path=.* cannot be used"):
        SafetensorsFiles(tmp_path / "file", LAYOUT)
