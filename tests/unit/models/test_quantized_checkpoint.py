"""Quantized modules are read as the matrices that they mean, or refused by field before any data is read."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.config.quantized_checkpoint import read_quantization
from quire.errors import ModelError, WeightsError
from quire.layers.stored_weight import StoredWeight
from quire.models.quantized_checkpoint import QuantizedCheckpoint
from quire.models.safetensors_file import SafetensorsFile
from tests.models.compressed_files import KINDS, Kind, to_words

Tensors = dict[str, torch.Tensor]
NUM_SPOILT = 500


def read(directory: Path, settings: dict[str, Any], tensors: Tensors) -> QuantizedCheckpoint:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    file = SafetensorsFile(directory / "model.safetensors")
    quantization = read_quantization({"quantization_config": settings})
    assert quantization is not None
    return QuantizedCheckpoint(dict.fromkeys(file.entries, file), quantization)


def numbers_of(weight: torch.Tensor | StoredWeight) -> torch.Tensor:
    """In the order of the inputs."""
    return weight.dequantize() if isinstance(weight, StoredWeight) else weight.float()


def weight_of(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.1


def module_of(kind: Kind, name: str = "a", rows: int = 48, columns: int = 128) -> tuple[Tensors, torch.Tensor]:
    parts, numbers = kind.write(weight_of(rows, columns))
    return {name + end: part for end, part in parts.items()}, numbers


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_format_is_read_as_the_numbers_that_it_means(tmp_path: Path, kind: Kind):
    tensors, numbers = module_of(kind)
    plain = torch.randn(4, 4)
    checkpoint = read(tmp_path, kind.settings, {**tensors, "lm_head.weight": plain, "a.bias": plain[0].clone()})
    assert set(checkpoint.entries) == {"a.weight", "lm_head.weight", "a.bias"}
    assert checkpoint.entries["a.weight"].shape == numbers.shape
    weight = checkpoint.read("a.weight")
    assert torch.allclose(numbers_of(weight), numbers, rtol=1e-6, atol=1e-7)
    if isinstance(weight, StoredWeight):
        assert weight.format == checkpoint.entries["a.weight"].format
        assert torch.equal(numbers_of(weight.rows(slice(3, 20))), numbers_of(weight)[3:20])
    assert torch.equal(checkpoint.read("lm_head.weight"), plain)
    checkpoint.release("a.weight")
    checkpoint.release("lm_head.weight")


def gptq(bits: int = 4, **fields: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "desc_act": True, **fields}


def gptq_module(codes: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor) -> Tensors:
    """Of codes [rows, inputs], zeros [rows, groups] and the group of each input; scales are 1."""
    return {
        "a.qweight": to_words(codes.long(), 4).t(),
        "a.qzeros": (to_words(zeros.t().long(), 4).long() - 0x11111111).int(),
        "a.scales": torch.ones(zeros.shape[1], len(codes), dtype=torch.float16),
        "a.g_idx": groups.int(),
    }


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zero_points_of_gptq_may_be_zero_and_any_order_of_groups(tmp_path: Path, version: str):
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (16, 96), generator=generator)
    zeros = torch.randint(0, 16, (16, 3), generator=generator)
    groups = (torch.arange(96) // 32)[torch.randperm(96, generator=generator)]
    tensors = gptq_module(codes, zeros, groups)
    if version == "gptq_v2":
        tensors["a.qzeros"] = to_words(zeros.t().long(), 4)
    weight = read(tmp_path, gptq(checkpoint_format=version), tensors).read("a.weight")
    assert isinstance(weight, StoredWeight) and weight.input_order is not None
    assert torch.equal(numbers_of(weight), (codes - zeros[:, groups]).float())
    in_order = gptq_module(codes, zeros, torch.arange(96) // 32)
    weight = read(tmp_path, gptq(), in_order).read("a.weight")
    assert isinstance(weight, StoredWeight) and weight.input_order is None


def test_the_tensors_of_an_awq_module_are_read_in_their_order(tmp_path: Path):
    words = torch.zeros(32, 2, dtype=torch.int32)
    words[5, 1] = 0x76543210
    tensors = {
        "a.qweight": words,
        "a.qzeros": torch.zeros(1, 2, dtype=torch.int32),
        "a.scales": torch.ones(1, 16).half(),
    }
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    weight = numbers_of(read(tmp_path, settings, tensors).read("a.weight"))
    assert weight[8:, 5].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert int(weight.sum()) == 28


def test_modules_of_a_mixed_checkpoint_are_told_by_their_tensors(tmp_path: Path):
    kinds = {"a": "packed with zero points", "b": "fp8", "c": "int8", "d": "packed 8 bits"}
    groups, tensors, numbers = {}, {}, {}
    for name, kind in kinds.items():
        parts, numbers[name] = module_of(KINDS[kind], name)
        tensors.update(parts)
        groups[name] = {**KINDS[kind].settings["config_groups"]["group_0"], "format": KINDS[kind].settings["format"]}
    settings = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    checkpoint = read(tmp_path, settings, tensors)
    for name in kinds:
        assert torch.allclose(numbers_of(checkpoint.read(f"{name}.weight")), numbers[name], rtol=1e-6, atol=1e-7)


def test_biases_of_zeros_that_the_model_does_not_have_may_be_left_out(tmp_path: Path):
    tensors, _ = module_of(KINDS["gptq of 8 bits"])
    tensors |= {"a.bias": torch.zeros(48), "b.bias": torch.zeros(48)}
    checkpoint = read(tmp_path, KINDS["gptq of 8 bits"].settings, tensors)
    assert checkpoint.may_be_left_out("a.bias") and not checkpoint.may_be_left_out("b.bias")
    assert not checkpoint.may_be_left_out("a.weight")
    checkpoint = read(tmp_path, KINDS["gptq of 8 bits"].settings, {**tensors, "a.bias": torch.ones(48)})
    assert not checkpoint.may_be_left_out("a.bias")


def test_scales_of_activations_and_of_the_cache_are_left_out(tmp_path: Path):
    tensors, _ = module_of(KINDS["int8 with static inputs"])
    spare = {
        f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_scale", "q_proj.output_scale")
    }
    checkpoint = read(tmp_path, KINDS["int8 with static inputs"].settings, {**tensors, **spare})
    assert set(checkpoint.entries) == {"a.weight"}


Change = Callable[[Tensors], Any]


def without(end: str) -> Change:
    return lambda tensors: tensors.pop(f"a{end}")


def replaced(end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({f"a{end}": change(tensors[f"a{end}"])})


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = torch.nan
    return changed


def state_of(**fields: Any) -> Change:
    def change(state: torch.Tensor) -> torch.Tensor:
        raw = {**json.loads(bytes(state.tolist())), **fields}
        return torch.tensor(list(json.dumps(raw).encode()), dtype=torch.uint8)

    return replaced(".weight.quant_state.bitsandbytes__nf4", change)


PACKED, ORDERED, INT8, FP8 = "packed with zero points", "packed in act-order", "int8", "fp8 in blocks"
STATE = ".weight.quant_state.bitsandbytes__nf4"
# Name -> (kind, what is done to its tensors, the field that the error names).
BROKEN: dict[str, tuple[str, Change, str]] = {
    "packed without scales": (PACKED, without(".weight_scale"), ".weight_scale"),
    "packed without shape": (PACKED, without(".weight_shape"), ".weight_shape"),
    "packed without zero points": (PACKED, without(".weight_zero_point"), ".weight_packed"),
    "zero points too many": (PACKED, replaced(".weight_zero_point", lambda t: torch.cat([t, t])), ".weight_zero_point"),
    "another shape": (PACKED, replaced(".weight_shape", lambda t: t * 2), ".weight_shape"),
    "more inputs": (PACKED, replaced(".weight_shape", lambda t: t + torch.tensor([0, 64])), ".weight_packed"),
    "words of another type": (PACKED, replaced(".weight_packed", lambda t: t.float()), ".weight_packed"),
    "scales for other groups": (PACKED, replaced(".weight_scale", lambda t: t[:, :2]), ".weight_packed"),
    "scales of integers": (PACKED, replaced(".weight_scale", lambda t: t.int()), ".weight_scale"),
    "packed with NaN scales": (PACKED, replaced(".weight_scale", with_nan), ".weight_scale"),
    "a group out of range": (ORDERED, replaced(".weight_g_idx", lambda t: t + 1), ".weight_g_idx"),
    "a negative group": (ORDERED, replaced(".weight_g_idx", lambda t: t - 1), ".weight_g_idx"),
    "groups of other sizes": (ORDERED, replaced(".weight_g_idx", lambda t: t.clamp(max=2)), ".weight_g_idx"),
    "too few groups": (ORDERED, replaced(".weight_g_idx", lambda t: t[:5]), ".weight_g_idx"),
    "int8 without scales": (INT8, without(".weight_scale"), ".weight_scale"),
    "int8 with scales of other rows": (INT8, replaced(".weight_scale", lambda t: t[:7]), ".weight_scale"),
    "int8 with infinite scales": (INT8, replaced(".weight_scale", lambda t: t / 0), ".weight_scale"),
    "a vector of int8": (INT8, replaced(".weight", lambda t: t[0]), ".weight"),
    "zero points of another type": (
        "int8 with zero points", replaced(".weight_zero_point", lambda t: t.float()), ".weight_zero_point"
    ),
    "zero points of other rows": (
        "int8 with zero points", replaced(".weight_zero_point", lambda t: t[:3]), ".weight_zero_point"
    ),
    "fp8 without scales": (FP8, without(".weight_scale"), ".weight_scale_inv"),
    "fp8 with scales of other blocks": (FP8, replaced(".weight_scale", lambda t: t[:1]), ".weight_scale"),
    "fp8 with NaN scales": (FP8, replaced(".weight_scale", with_nan), ".weight_scale"),
    "gptq without zero points": ("gptq of 8 bits", without(".qzeros"), ".qzeros"),
    "gptq without scales": ("gptq of 8 bits", without(".scales"), ".scales"),
    "gptq with other scales": ("gptq of 8 bits", replaced(".scales", lambda t: t[:, :8]), ".scales"),
    "gptq with zero points, though symmetric": (
        "gptq of 8 bits", replaced(".qzeros", lambda t: t + 1), ".qweight"
    ),
    "nf4 without scales": ("nf4", without(".weight.absmax"), ".weight.absmax"),
    "nf4 without its weight": ("nf4", without(".weight"), ".weight"),
    "nf4 without its table": ("nf4", without(".weight.quant_map"), ".weight.quant_map"),
    "nf4 with another table": ("nf4", replaced(".weight.quant_map", lambda t: t * 0.5), ".weight.quant_map"),
    "nf4 with fewer blocks": ("nf4", replaced(".weight.absmax", lambda t: t[:3]), ".weight.absmax"),
    "nf4 with NaN scales": ("nf4", replaced(".weight.nested_absmax", with_nan), ".weight.nested_absmax"),
    "nf4 of another shape": ("nf4", state_of(shape=[64, 128]), ".weight"),
    "nf4 of three dimensions": ("nf4", state_of(shape=[2, 3, 4]), STATE),
    "nf4 in blocks of nothing": ("nf4", state_of(blocksize=0), STATE),
    "fp4": ("nf4", state_of(quant_type="fp4"), STATE),
    "nf4 with a broken state": ("nf4", replaced(STATE, lambda t: t[:9]), STATE),
    "a huge state": ("nf4", replaced(STATE, lambda t: t.repeat(100)), STATE),
    "bitsandbytes without scales": ("int8 of bitsandbytes", without(".SCB"), ".SCB"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "field"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_module_is_refused_by_field(tmp_path: Path, kind: str, change: Change, field: str):
    tensors, _ = module_of(KINDS[kind])
    change(tensors)
    with pytest.raises(WeightsError) as error:
        read(tmp_path, KINDS[kind].settings, tensors).read("a.weight")
    assert error.value.field == f"a{field}"
    assert error.value.hint


DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn)
VALUES = (None, 0, -1, 1, 3, 128, 2**40, "x", "", [], {}, [128, 128], True, False, 1.5, float("nan"), "group", "block")


def spoilt(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """Of another type or shape, or with other bytes."""
    if tensor.dim() == 0 or rng.random() < 0.2:
        return tensor.to(rng.choice(DTYPES))
    size = len(tensor)
    kinds: list[Callable[[], torch.Tensor]] = [
        tensor.flatten,
        lambda: tensor[: rng.randrange(size + 1)],
        lambda: tensor.unsqueeze(0),
        lambda: tensor[..., :-1],
        lambda: torch.zeros([rng.choice((0, 1, 2, 7)) for _ in range(rng.randrange(4))], dtype=tensor.dtype),
        lambda: with_other_bytes(tensor, rng),
    ]
    return rng.choice(kinds)()


def with_other_bytes(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    raw = tensor.contiguous().clone().view(torch.uint8).flatten()
    for _ in range(3):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return raw.view(tensor.dtype).view(tensor.shape)


def spoil_settings(settings: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(list(settings))
    if isinstance(settings[name], dict) and settings[name] and rng.random() < 0.7:
        spoil_settings(settings[name], rng)
    else:
        settings[name] = rng.choice(VALUES)


def test_spoilt_checkpoints_are_read_or_refused(tmp_path: Path):
    rng, modules = random.Random(0), {kind: module_of(KINDS[kind], columns=64)[0] for kind in KINDS}
    counts = {"read": 0, "refused": 0}
    for _ in range(NUM_SPOILT):
        kind = rng.choice(list(KINDS))
        tensors, settings = dict(modules[kind]), copy.deepcopy(KINDS[kind].settings)
        if rng.random() < 0.4:
            spoil_settings(settings, rng)
        for name in rng.sample(list(tensors), rng.choice((0, 1, 1, 2))):
            tensors[name] = spoilt(tensors[name], rng)
        try:
            checkpoint = read(tmp_path, settings, {name: tensor.clone() for name, tensor in tensors.items()})
            for name in checkpoint.entries:
                numbers_of(checkpoint.read(name))
            counts["read"] += 1
        except ModelError as error:
            assert error.hint and error.field
            counts["refused"] += 1
    assert min(counts.values()) > NUM_SPOILT // 10
