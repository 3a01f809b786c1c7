"""How much memory a model takes, before it is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.engine.config_lookup import look_up
from quire.executor.footprint import footprint_of, weight_file_bytes, with_kv_cache_bytes

MIB = 1 << 20


def resolved(**settings: object) -> QuireConfig:
    """Of the embedded model."""
    values = {"model": "leaf", "max_model_len": 512, "max_num_seqs": 4, "dtype": "bfloat16", **settings}
    return look_up(build_config(**values))[0]


def test_weights_and_workspace_follow_the_type_of_numbers():
    narrow, wide = footprint_of(resolved(), 0), footprint_of(resolved(dtype="float32"), 0)
    assert narrow.file_bytes == wide.file_bytes == weight_file_bytes(Path(resolved().model_path)) > MIB
    assert narrow.num_bytes - narrow.kv_cache_bytes > narrow.file_bytes
    assert wide.num_bytes > narrow.num_bytes + narrow.file_bytes // 2


def test_the_kv_cache_lies_between_one_request_and_as_many_as_there_can_be():
    least, most = footprint_of(resolved(), 0).kv_cache_bytes, footprint_of(resolved(), 1 << 40).kv_cache_bytes
    assert 0 < least < most < 5 * least
    between = (least + most) // 2
    assert footprint_of(resolved(), between).kv_cache_bytes == between


def test_settings_for_the_kv_cache_win():
    assert footprint_of(resolved(kv_cache_memory_bytes=MIB), 1 << 30).kv_cache_bytes == MIB
    one = footprint_of(resolved(num_gpu_blocks_override=10), 0).kv_cache_bytes
    assert footprint_of(resolved(num_gpu_blocks_override=20), 0).kv_cache_bytes == 2 * one > 0
    given = build_config(model="leaf", kv_cache_memory_bytes=MIB)
    assert with_kv_cache_bytes(given, 7) is given
    assert with_kv_cache_bytes(build_config(model="leaf"), 7).cache.kv_cache_memory_bytes == 7


def test_weights_that_are_stored_quantized_take_what_their_files_do(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    (tmp_path / "notes.txt").write_bytes(b"0" * 1000)
    config = dataclasses.replace(resolved(), model_path=str(tmp_path))
    stored, plain = footprint_of(config, 0, is_stored=True), footprint_of(config, 0)
    assert stored.file_bytes == 1000 and stored.num_bytes < plain.num_bytes


def test_all_parts_of_a_split_file_count(tmp_path: Path):
    for name in ("m[1]-00001-of-00002.gguf", "m[1]-00002-of-00002.gguf", "m[1]-00001-of-00003.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"0" * 10)
    assert weight_file_bytes(tmp_path / "m[1]-00001-of-00002.gguf") == 20
    assert weight_file_bytes(tmp_path / "other.gguf") == 10 and weight_file_bytes(tmp_path / "none.gguf") == 0
