"""The file of a block: what was written is read, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from quire.kv_offload.block_file import HEADER, read_block_file, write_block_file
from quire.kv_offload.faults import BlockFault, FaultKind
from tests.unit.kv_offload.fakes import BLOCK_BYTES, NAMESPACE, content, key

TIME_NS = 1_700_000_000_000_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / f"{key(1).hex()}.kv"
    write_block_file(path, NAMESPACE, key(1), content(1), TIME_NS)
    return path


def read(path: Path, *, namespace: bytes = NAMESPACE, name: bytes = key(1), num_bytes: int = BLOCK_BYTES) -> np.ndarray:
    payload = np.empty(num_bytes, np.uint8)
    read_block_file(path, namespace, name, payload)
    return payload


def test_what_was_written_is_read(path):
    assert (read(path) == content(1)).all()
    assert path.stat().st_mtime_ns == TIME_NS and path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_a_changed_bit_anywhere_is_found(path):
    whole = path.read_bytes()
    positions = [*range(HEADER.size), HEADER.size + 7, len(whole) - 1]
    for position in positions:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(BlockFault):
            read(path)


@pytest.mark.parametrize("size", [0, 1, HEADER.size - 1, HEADER.size, HEADER.size + BLOCK_BYTES - 1])
def test_a_file_that_was_cut_is_found(path, size):
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(BlockFault) as fault:
        read(path)
    assert fault.value.kind is FaultKind.WRONG_SIZE


def test_a_file_of_another_block_model_or_size_is_not_read(path):
    with pytest.raises(BlockFault) as fault:
        read(path, name=key(2))
    assert fault.value.kind is FaultKind.OTHER_BLOCK
    with pytest.raises(BlockFault) as fault:
        read(path, namespace=key(3))
    assert fault.value.kind is FaultKind.OTHER_BLOCK
    with pytest.raises(BlockFault) as fault:
        read(path, num_bytes=BLOCK_BYTES + 1)
    assert fault.value.kind is FaultKind.WRONG_SIZE


def test_links_and_pipes_are_not_read(path, tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(path)
    with pytest.raises(OSError):
        read(link)
    os.mkfifo(pipe)
    with pytest.raises(BlockFault) as fault:
        read(pipe)
    assert fault.value.kind is FaultKind.NOT_A_BLOCK
