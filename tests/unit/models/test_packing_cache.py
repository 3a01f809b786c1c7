from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire import envs
from quire.kernels.native.runtime import NativeRuntime
from quire.models import packed_file
from quire.models.packed_file import FORMAT_VERSION, MAGIC, PAGE_BYTES, PREFIX
from quire.models.packing_cache import ABANDONED_S, PackingCache, default_cache_directory
from quire.models.packing_key import packing_key

KEY = "ab" * 32
OTHER = "cd" * 32


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return NativeRuntime("portable")


@pytest.fixture
def cache(tmp_path: Path, runtime: NativeRuntime) -> PackingCache:
    return PackingCache(tmp_path / "quire" / "packed", runtime)


def entry(tmp_path: Path, key: str = KEY) -> Path:
    return tmp_path / "quire" / "packed" / f"{key}.packed"


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(33, 65, generator=generator).bfloat16(),
        "layers.0.qkv": torch.randint(-128, 128, (7, 640), dtype=torch.int8, generator=generator),
        "layers.0.scales": torch.randn(7, generator=generator),
        "nibbles": torch.randint(0, 256, (PAGE_BYTES,), dtype=torch.uint8, generator=generator),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3, dtype=torch.int32),
    }


def assert_equal(found: dict[str, torch.Tensor] | None, expected: dict[str, torch.Tensor]) -> None:
    assert found is not None and list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def test_what_was_written_is_read_again(cache: PackingCache, tmp_path: Path):
    assert cache.open(KEY) is None
    assert cache.write(KEY, tensors())
    assert_equal(cache.open(KEY), tensors())
    assert [path.name for path in entry(tmp_path).parent.iterdir()] == [entry(tmp_path).name]


def test_only_this_user_may_enter(cache: PackingCache, tmp_path: Path):
    cache.write(KEY, tensors())
    assert entry(tmp_path).stat().st_mode & 0o777 == 0o600
    for folder in (entry(tmp_path).parent, entry(tmp_path).parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_write_to_a_tensor_does_not_reach_the_file(cache: PackingCache):
    cache.write(KEY, tensors())
    found = cache.open(KEY)
    assert found is not None
    found["embed"].zero_()
    assert_equal(cache.open(KEY), tensors())


def test_tensors_outlive_the_removal_of_their_file(cache: PackingCache, tmp_path: Path):
    cache.write(KEY, tensors())
    found = cache.open(KEY)
    entry(tmp_path).unlink()
    assert_equal(found, tensors())
    assert cache.open(KEY) is None


def test_tensors_that_are_given_take_the_values(cache: PackingCache):
    cache.write(KEY, tensors())
    given = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    found = cache.open(KEY, into=given)
    assert_equal(given, tensors())
    assert found is not None and all(found[name] is tensor for name, tensor in given.items())


@pytest.mark.parametrize("change", ["name", "shape", "dtype", "order"])
def test_tensors_other_than_those_that_were_written_take_nothing(cache: PackingCache, caplog, change: str):
    cache.write(KEY, tensors())
    given = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    embed = given.pop("embed")
    others = {
        "name": {"other": embed, **given},
        "shape": {"embed": torch.zeros(65, 33, dtype=embed.dtype), **given},
        "dtype": {"embed": embed.float(), **given},
        "order": {**given, "embed": embed},
    }
    with caplog.at_level(logging.WARNING, "quire"):
        assert cache.open(KEY, into=others[change]) is None
    assert "its tensors are not those" in caplog.text
    assert all(not tensor.any() for tensor in others[change].values())
    assert_equal(cache.open(KEY), tensors())


def test_after_damage_the_given_tensors_are_zeros(cache: PackingCache, tmp_path: Path, caplog):
    cache.write(KEY, tensors())
    data = bytearray(entry(tmp_path).read_bytes())
    data[-1] ^= 1
    entry(tmp_path).write_bytes(data)
    given = {name: torch.ones_like(tensor) for name, tensor in tensors().items()}
    assert cache.open(KEY, into=given) is None
    assert all(not tensor.any() for tensor in given.values())


def test_runs_of_several_threads_meet_without_a_gap(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(packed_file, "RUN_BYTES", 1000)
    cache = PackingCache(tmp_path, NativeRuntime("portable", num_threads=3))
    cache.write(KEY, tensors())
    assert_equal(cache.open(KEY), tensors())


def test_writing_behind_leaves_the_same_file(cache: PackingCache):
    cache.wait()
    cache.write_behind(KEY, tensors())
    cache.wait()
    assert_equal(cache.open(KEY), tensors())


def refused(cache: PackingCache, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "quire"):
        assert cache.open(KEY) is None
    assert reason in caplog.text, caplog.text


def test_a_file_cut_anywhere_is_a_miss_and_is_removed(cache: PackingCache, tmp_path: Path, caplog):
    cache.write(KEY, tensors())
    whole = entry(tmp_path).read_bytes()
    for size in (0, 1, 47, 48, 100, PAGE_BYTES - 1, PAGE_BYTES, len(whole) - PAGE_BYTES, len(whole) - 1):
        entry(tmp_path).write_bytes(whole[:size])
        refused(cache, caplog, "are not used: it")
        assert not entry(tmp_path).exists(), size
    entry(tmp_path).write_bytes(whole + b"\0")
    refused(cache, caplog, f"it has {len(whole) + 1} bytes, {len(whole)} were written")


def test_no_flipped_byte_goes_unseen(cache: PackingCache, tmp_path: Path, caplog):
    cache.write(KEY, tensors())
    whole = entry(tmp_path).read_bytes()
    positions = {*range(64), *range(0, len(whole), 97), *range(PAGE_BYTES - 8, PAGE_BYTES + 8), len(whole) - 1}
    for position in sorted(positions):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        entry(tmp_path).write_bytes(damaged)
        assert cache.open(KEY) is None, position
    entry(tmp_path).write_bytes(whole)
    assert_equal(cache.open(KEY), tensors())
    assert all("are not used" in record.getMessage() for record in caplog.records)


def rewritten(tmp_path: Path, **changes: object) -> None:
    """The entry with another header, whose checksum is right."""
    data = entry(tmp_path).read_bytes()
    _, _, block_bytes, _ = PREFIX.unpack(data[: PREFIX.size])
    header = {**json.loads(data[PREFIX.size : PREFIX.size + block_bytes].rstrip(b"\0")), **changes}
    block = json.dumps(header).encode().ljust(block_bytes, b"\0")
    assert len(block) == block_bytes
    prefix = PREFIX.pack(MAGIC, FORMAT_VERSION, block_bytes, hashlib.sha256(block).digest())
    entry(tmp_path).write_bytes(prefix + block + data[PREFIX.size + block_bytes :])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": OTHER}, f"it was written for key {OTHER}"),
        ({"tensors": {}}, "its tensors end at"),
        ({"tensors": {"a": {"dtype": "int8", "shape": [1 << 40], "offset": 0, "checksum": "0"}}}, "malformed"),
        ({"tensors": {"a": {"dtype": "object", "shape": [1], "offset": 0, "checksum": "0"}}}, "malformed"),
        ({"tensors": {"a": {"dtype": "int8", "shape": [1], "offset": 4096, "checksum": "0"}}}, "does not start where"),
        ({"tensors": {"a": {"dtype": "int8", "shape": [-5], "offset": 0, "checksum": "0"}}}, "malformed"),
        ({"tensors": [1]}, "malformed"),
        ({"data_bytes": "many"}, "malformed"),
    ],
    ids=["another key", "no tensors", "too large", "no such dtype", "elsewhere", "negative", "no table", "no size"],
)
def test_a_header_that_lies_is_refused(cache: PackingCache, tmp_path: Path, caplog, changes, reason: str):
    cache.write(KEY, tensors())
    rewritten(tmp_path, **changes)
    refused(cache, caplog, reason)


def test_a_newer_format_is_left_for_who_can_read_it(cache: PackingCache, tmp_path: Path, caplog):
    cache.write(KEY, tensors())
    data = bytearray(entry(tmp_path).read_bytes())
    data[8:12] = (FORMAT_VERSION + 1).to_bytes(4, "little")
    entry(tmp_path).write_bytes(data)
    refused(cache, caplog, f"its format is version {FORMAT_VERSION + 1}, this Quire reads version {FORMAT_VERSION}")
    assert entry(tmp_path).exists()


def test_two_writers_and_readers_never_see_a_torn_file(tmp_path: Path, runtime: NativeRuntime):
    contents = [tensors(seed) for seed in range(2)]
    stop, wrong = threading.Event(), []

    def write(which: int) -> None:
        cache = PackingCache(tmp_path, runtime)
        while not stop.is_set():
            if not cache.write(KEY, contents[which]):
                wrong.append("write")

    def read() -> None:
        cache = PackingCache(tmp_path, runtime)
        for _ in range(100):
            found = cache.open(KEY)
            if found is None or not any(torch.equal(found["embed"], one["embed"]) for one in contents):
                wrong.append("read")

    PackingCache(tmp_path, runtime).write(KEY, contents[0])
    writers = [threading.Thread(target=write, args=(which,)) for which in range(2)]
    for writer in writers:
        writer.start()
    read()
    stop.set()
    for writer in writers:
        writer.join()
    assert not wrong and [path.name for path in tmp_path.iterdir()] == [f"{KEY}.packed"]


def test_a_place_that_cannot_be_written_is_a_warning(tmp_path: Path, runtime: NativeRuntime, caplog):
    (tmp_path / "file").write_text("no directory")
    with caplog.at_level(logging.WARNING, "quire"):
        assert not PackingCache(tmp_path / "file" / "packed", runtime).write(KEY, tensors())
    assert "packed weights are not cached" in caplog.text


def test_a_full_disk_is_a_warning_and_leaves_nothing(cache: PackingCache, tmp_path: Path, monkeypatch, caplog):
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING, "quire"):
        assert not cache.write(KEY, tensors())
    assert "No space left" in caplog.text and not list(entry(tmp_path).parent.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(cache: PackingCache, tmp_path: Path, caplog, mode: int):
    cache.write(KEY, tensors())
    entry(tmp_path).parent.chmod(mode)
    refused(cache, caplog, "can be written by other users")
    assert not cache.write(OTHER, tensors())
    entry(tmp_path).parent.chmod(0o755)
    assert_equal(cache.open(KEY), tensors())


def test_a_file_that_others_may_write_to_is_refused(cache: PackingCache, tmp_path: Path, caplog):
    cache.write(KEY, tensors())
    entry(tmp_path).chmod(0o666)
    refused(cache, caplog, "it can be written by other users")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_another_users_directory_or_file_is_refused(cache: PackingCache, tmp_path: Path, caplog):
    cache.write(KEY, tensors())
    os.chown(entry(tmp_path), 12345, -1)
    refused(cache, caplog, "it belongs to another user (uid 12345)")
    os.chown(entry(tmp_path).parent, 12345, -1)
    refused(cache, caplog, "belongs to another user")
    assert not cache.write(KEY, tensors())


def test_links_pipes_and_directories_in_place_of_an_entry_are_refused(cache: PackingCache, tmp_path: Path, caplog):
    cache.write(OTHER, tensors())
    entry(tmp_path).symlink_to(entry(tmp_path, OTHER))
    refused(cache, caplog, "are not used")
    entry(tmp_path).unlink()
    os.mkfifo(entry(tmp_path))
    refused(cache, caplog, "it is not a regular file")
    entry(tmp_path).unlink()
    entry(tmp_path).mkdir()
    refused(cache, caplog, "it is not a regular file")


def test_what_was_used_least_lately_goes_when_the_limit_is_reached(tmp_path: Path, runtime: NativeRuntime):
    one = {"a": torch.zeros(50_000)}
    cache = PackingCache(tmp_path, runtime, max_bytes=500_000)
    for age, key in enumerate(["aa", "bb"]):
        assert cache.write(key, one)
        os.utime(tmp_path / f"{key}.packed", (1000 + age, 1000 + age))
    assert cache.open("aa") is not None  # used: younger than bb from here on
    assert cache.write("cc", one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aa.packed", "cc.packed"]


def test_what_is_larger_than_the_limit_is_not_written(tmp_path: Path, runtime: NativeRuntime, caplog):
    cache = PackingCache(tmp_path / "packed", runtime, max_bytes=1000)
    with caplog.at_level(logging.WARNING, "quire"):
        assert not cache.write(KEY, tensors())
    assert "more than the cache limit" in caplog.text and not (tmp_path / "packed").exists()


def test_files_of_writers_that_died_are_removed(cache: PackingCache, tmp_path: Path):
    cache.write(KEY, tensors())
    old, new = entry(tmp_path).parent / ".writing-old", entry(tmp_path).parent / ".writing-new"
    for path in (old, new):
        path.write_bytes(b"x")
    then = time.time() - ABANDONED_S - 100
    os.utime(old, (then, then))
    cache.write(OTHER, tensors())
    assert not old.exists() and new.exists()


def test_a_tensor_that_cannot_be_kept_is_a_warning(cache: PackingCache, caplog):
    for tensor in (torch.zeros(4, 4).T[1:], torch.zeros(2, dtype=torch.complex64), torch.empty(2, device="meta")):
        with caplog.at_level(logging.WARNING, "quire"):
            assert not cache.write(KEY, {"a": tensor})
    assert caplog.text.count("packed weights are not cached") == 3


class TestKey:
    HOW = {"layout": 1, "tier": "amx", "quantization": "int8", "dtype": "bfloat16"}  # noqa: RUF012

    def save(self, tmp_path: Path, changed: int | None = None, name: str = "model.safetensors") -> Path:
        weights = torch.arange(10_000, dtype=torch.float32)
        if changed is not None:
            weights[changed] = -1
        path = tmp_path / name
        save_file({"w": weights, "b": torch.ones(3)}, path)
        os.utime(path, (1, 1))
        return path

    def test_the_same_weights_packed_alike_have_the_same_key(self, tmp_path: Path):
        first = packing_key([self.save(tmp_path)], self.HOW)
        assert first == packing_key([self.save(tmp_path)], dict(reversed(self.HOW.items())))
        assert len(first) == 64 and first.isalnum()

    def test_other_weights_names_times_or_ways_of_packing_have_other_keys(self, tmp_path: Path):
        keys = [packing_key([self.save(tmp_path)], self.HOW)]
        keys += [packing_key([self.save(tmp_path, changed)], self.HOW) for changed in (0, 5000, 9999)]
        keys += [packing_key([self.save(tmp_path, name="other.safetensors")], self.HOW)]
        path = self.save(tmp_path)
        keys += [packing_key([path], {**self.HOW, name: 7}) for name in self.HOW]
        os.utime(path, (2, 2))
        keys += [packing_key([path], self.HOW)]
        assert len(set(keys)) == len(keys)


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("QUIRE_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_directory() == tmp_path / ".cache" / "quire" / "packed"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_directory() == tmp_path / ".cache" / "quire" / "packed"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_directory() == Path("/xdg/quire/packed")
    monkeypatch.setenv("QUIRE_CACHE_DIR", "~/mine")
    assert default_cache_directory() == tmp_path / "mine" / "packed"


def test_without_a_home_there_is_no_cache(monkeypatch):
    def fail() -> Path:
        raise RuntimeError("no home")

    for name in ("QUIRE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", fail)
    assert envs.cache_dir() is None and default_cache_directory() is None
