"""Finding weight files and copying them into a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.errors import WeightsError
from quire.layers.weight_target import TensorTarget
from quire.models.weight_files import INDEX_NAME
from quire.models.weights import SafetensorsCheckpoint, load_weights, relative_error

NAMES = ("a.weight", "b.weight", "c.bias")


def targets(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.zeros(2, 3, dtype=dtype),
        "b.weight": torch.zeros(4, dtype=dtype),
        "c.bias": torch.zeros(1),
    }


def load(directory: Path, filled: dict[str, torch.Tensor], *, ignored: tuple[str, ...] = ()) -> None:
    places = {name: TensorTarget(tensor) for name, tensor in filled.items()}
    load_weights(SafetensorsCheckpoint(directory), directory, places, ignored=ignored)


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(target.shape, generator=generator).to(dtype) for name, target in targets().items()}


def save_sharded(directory: Path, weight_map: dict[str, Any] | None = None) -> None:
    saved = tensors()
    save_file({"a.weight": saved["a.weight"]}, directory / "model-1.safetensors")
    save_file({name: saved[name] for name in NAMES[1:]}, directory / "model-2.safetensors")
    weight_map = weight_map or {name: f"model-{1 if name == 'a.weight' else 2}.safetensors" for name in NAMES}
    (directory / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_loaded(filled: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(filled[name], tensor) for name, tensor in tensors().items())


def refusal(directory: Path, ignored: tuple[str, ...] = ()) -> WeightsError:
    untouched = targets()
    with pytest.raises(WeightsError) as caught:
        load(directory, untouched, ignored=ignored)
    assert caught.value.hint and not any(tensor.any() for tensor in untouched.values())
    return caught.value


def test_a_single_file_fills_the_targets(tmp_path: Path):
    save_file(tensors(), tmp_path / "model.safetensors")
    filled = targets()
    load(tmp_path, filled)
    assert_loaded(filled)


def test_shards_fill_the_targets_through_links_as_in_the_hub_cache(tmp_path: Path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    save_sharded(blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    filled = targets()
    load(snapshot, filled)
    assert_loaded(filled)


def test_files_of_other_names_are_read_when_there_is_no_index(tmp_path: Path):
    save_sharded(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    save_file(tensors(), tmp_path / "consolidated.safetensors")
    filled = targets()
    load(tmp_path, filled)
    assert_loaded(filled)


def test_the_dtype_is_converted(tmp_path: Path):
    save_file(tensors(torch.bfloat16), tmp_path / "model.safetensors")
    filled = targets()
    load(tmp_path, filled)
    assert torch.equal(filled["b.weight"], tensors(torch.bfloat16)["b.weight"].float())


def test_ignorable_tensors_are_ignored(tmp_path: Path):
    extra = {"lm_head.weight": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**tensors(), **extra}, tmp_path / "model.safetensors")
    filled = targets()
    load(tmp_path, filled, ignored=("lm_head.weight",))
    assert_loaded(filled)
    assert "1 tensors: lm_head.weight" in str(refusal(tmp_path))


def test_missing_tensors_are_counted_and_the_first_five_named(tmp_path: Path):
    save_file({"a.weight": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    many = {**targets(), **{f"layer.{i}": torch.zeros(1) for i in range(9)}}
    with pytest.raises(WeightsError) as caught:
        load(tmp_path, many)
    assert "lacks 11 tensors: b.weight, c.bias, layer.0, layer.1, layer.2, ..." in str(caught.value)


def test_unexpected_tensors_are_counted_and_named(tmp_path: Path):
    save_file({**tensors(), **{f"x.{i}": torch.zeros(1) for i in range(6)}}, tmp_path / "model.safetensors")
    assert "has 6 tensors: x.0, x.1, x.2, x.3, x.4, ..." in str(refusal(tmp_path))


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path):
    save_file({**tensors(), "a.weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    assert "a.weight has shape [3, 2], config.json gives [2, 3]" in str(refusal(tmp_path))


def test_an_integer_tensor_is_refused_as_quantized(tmp_path: Path):
    save_file({**tensors(), "b.weight": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert "b.weight is torch.int8, a quantized or integer type" in str(refusal(tmp_path))


def test_other_formats_are_refused_with_the_way_to_convert(tmp_path: Path):
    for name in ("pytorch_model.bin", "model.gguf"):
        (tmp_path / name).write_bytes(b"x")
    error = refusal(tmp_path)
    assert "only model.gguf, pytorch_model.bin" in str(error) and "save_pretrained" in str(error.hint)


def test_an_empty_directory_is_refused(tmp_path: Path):
    assert "no .safetensors file" in str(refusal(tmp_path))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    save_sharded(tmp_path)
    (tmp_path / INDEX_NAME).unlink()
    save_file(tensors(), tmp_path / "model-3.safetensors")
    assert "is in model-1.safetensors and in model-3.safetensors" in str(refusal(tmp_path))


@pytest.mark.parametrize(
    "name",
    ["../model-1.safetensors", "/etc/passwd", "sub/model-1.safetensors", "..", "", "model-1.bin", 7, None, ["x"], {}],
    ids=repr,
)
def test_an_index_may_only_name_files_beside_it(tmp_path: Path, name: object):
    save_sharded(tmp_path, {**dict.fromkeys(NAMES, "model-1.safetensors"), "b.weight": name})
    assert "plain name of a .safetensors file" in str(refusal(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path):
    save_sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    assert "names model-2.safetensors, which is missing" in str(refusal(tmp_path))


def test_an_index_at_odds_with_its_files_is_refused(tmp_path: Path):
    weight_map = {"a.weight": "model-1.safetensors", "b.weight": "model-1.safetensors", "c.bias": "model-2.safetensors"}
    save_sharded(tmp_path, weight_map)
    assert "'b.weight' is in model-1.safetensors, but it is not" in str(refusal(tmp_path))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 100_000], ids=len)
def test_a_malformed_index_is_refused(tmp_path: Path, text: str):
    save_sharded(tmp_path)
    (tmp_path / INDEX_NAME).write_text(text)
    assert INDEX_NAME in str(refusal(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=str)
def test_values_that_are_not_finite_are_named(tmp_path: Path, value: float):
    broken = tensors()
    broken["b.weight"][2] = value
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"tensor b\.weight has 1 values that are NaN or infinite") as caught:
        load(tmp_path, targets())
    assert caught.value.field == "b.weight" and caught.value.hint


def test_values_too_large_for_the_dtype_are_named(tmp_path: Path):
    large = tensors()
    large["b.weight"][0] = 1e6
    save_file(large, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="too large for the model's dtype"):
        load(tmp_path, targets(torch.float16))


def test_the_error_of_a_weight_is_relative():
    rows = torch.randn(4, 8)
    assert relative_error(rows, rows) == 0.0
    assert relative_error(rows, 0 * rows) == pytest.approx(1.0)
    assert relative_error(0 * rows, 0 * rows) == 0.0
