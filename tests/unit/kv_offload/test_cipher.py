"""Encrypted blocks: read with the key, and with nothing else; every change is found."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.kv_offload.block_file import HEADER, write_block_file
from quire.kv_offload.block_files import BlockFiles
from quire.kv_offload.cipher import OVERHEAD_BYTES, BlockCipher, read_key
from quire.kv_offload.counts import OffloadCounts
from quire.kv_offload.directory import BlockDirectory
from quire.kv_offload.disk_index import DiskIndex
from quire.kv_offload.faults import BlockFault, FaultKind
from quire.kv_offload.policies.lru import LRUPolicy
from tests.unit.kv_offload.fakes import BLOCK_BYTES, NAMESPACE, content, key

pytest.importorskip("cryptography")
SECRET = bytes(range(32))


def make_files(path: Path, secret: bytes = SECRET) -> BlockFiles:
    directory = BlockDirectory(path, NAMESPACE)
    directory.create({})
    return BlockFiles(directory, DiskIndex(LRUPolicy(1 << 20)), OffloadCounts(), BlockCipher(secret))


def only_file(path: Path) -> Path:
    (found,) = path.rglob("*.kv")
    return found


def read(files: BlockFiles, number: int = 1) -> np.ndarray:
    payload = np.empty(BLOCK_BYTES, np.uint8)
    files.read(key(number), payload, 0)
    return payload


def test_what_was_sealed_is_opened_and_nothing_in_the_directory_shows_it(tmp_path):
    files = make_files(tmp_path)
    files.write(key(1), content(1), 0)
    assert (read(files) == content(1)).all()
    assert key(1) in files and files.num_leading([key(1), key(2)], 0) == 1 and files.holds([key(2), key(1)]) == [0, 1]
    path = only_file(tmp_path)
    stored = path.read_bytes()
    assert len(stored) == HEADER.size + BLOCK_BYTES + OVERHEAD_BYTES
    assert content(1).tobytes()[:32] not in stored and key(1) not in stored and key(1).hex() not in str(path)
    files.write(key(1), content(1), 0)
    assert path.read_bytes() != stored, "no nonce comes twice"
    again = make_files(tmp_path)
    again.refresh()
    assert key(1) in again
    again.forget([key(1)])
    assert key(1) not in again


def test_a_change_that_has_a_right_checksum_and_another_key_are_found_by_the_tag(tmp_path):
    files = make_files(tmp_path)
    files.write(key(1), content(1), 0)
    path = only_file(tmp_path)
    sealed, name = np.frombuffer(path.read_bytes(), np.uint8)[HEADER.size :].copy(), bytes.fromhex(path.stem)
    for position in (0, 12, 500, len(sealed) - 1):
        changed = sealed.copy()
        changed[position] ^= 1
        write_block_file(path, NAMESPACE, name, changed, 0)  # as who knows the format and not the key
        with pytest.raises(BlockFault) as fault:
            read(files)
        assert fault.value.kind is FaultKind.WRONG_TAG and fault.value.kind.is_damage
    other = BlockCipher(bytes(32))
    assert other.key_id != BlockCipher(SECRET).key_id and other.name_of(key(1)) != name
    with pytest.raises(BlockFault):
        other.open(name, sealed, np.empty(BLOCK_BYTES, np.uint8))
    with pytest.raises(BlockFault):
        BlockCipher(SECRET).open(key(2), sealed, np.empty(BLOCK_BYTES, np.uint8))


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("ab" * 32, 0o644, "can be read by other users"),
        ("ab" * 31, 0o600, "64 hexadecimal digits"),
        ("x" * 64, 0o600, "64 hexadecimal digits"),
        ("", 0o600, "64 hexadecimal digits"),
    ],
)
def test_a_file_that_holds_no_key_is_refused_by_name(tmp_path, text, mode, message):
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=message) as error:
        read_key(path)
    assert error.value.field == "kv_disk_key_file" and error.value.hint


def test_a_key_is_read_and_a_file_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(SECRET.hex() + "\n")
    assert read_key(path) == SECRET
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key(tmp_path / "nothing")


def test_without_the_package_the_setting_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    with pytest.raises(ConfigError, match="needs the package cryptography"):
        BlockCipher(SECRET)
