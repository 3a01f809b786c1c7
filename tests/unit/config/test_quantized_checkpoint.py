"""`quantization_config` is read into schemes, or refused by field."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.quantized_checkpoint import CheckpointQuantization, WeightScheme, read_quantization
from quire.errors import ModelError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FLOAT8 = {"type": "float", "num_bits": 8}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def tensors(format: str, weights: dict[str, Any], **fields: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, **fields}


def only_scheme(config: dict[str, Any]) -> WeightScheme:
    found = read_quantization({"quantization_config": config})
    assert found is not None
    (scheme,) = found.schemes
    return scheme


def test_plain_models_have_none():
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


READ: dict[str, tuple[dict[str, Any], WeightScheme]] = {
    "gptq": (GPTQ, WeightScheme(packing="gptq", kind="int", num_bits=4, group_size=128)),
    "gptq of 8 bits, whole rows": (
        {**GPTQ, "bits": 8, "group_size": -1}, WeightScheme(packing="gptq", kind="int", num_bits=8)
    ),
    "gptq 2, asymmetric": (
        {**GPTQ, "checkpoint_format": "gptq_v2", "sym": False},
        WeightScheme(packing="gptq_v2", kind="int", num_bits=4, group_size=128, is_symmetric=False),
    ),
    "awq": (AWQ, WeightScheme(packing="awq", kind="int", num_bits=4, group_size=64, is_symmetric=False)),
    "awq by its older names": (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "version": "GEMM"},
        WeightScheme(packing="awq", kind="int", num_bits=4, group_size=128, is_symmetric=False),
    ),
    "fp8 in blocks": (
        FP8, WeightScheme(packing="blocks", kind="fp8", num_bits=8, group_size=128, block_rows=128)
    ),
    "fp8": ({"quant_method": "fp8"}, WeightScheme(packing="plain", kind="fp8", num_bits=8)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, WeightScheme(packing="plain", kind="fp8", num_bits=8)),
    "mxfp4": ({"quant_method": "mxfp4"}, WeightScheme(packing="mxfp4", kind="mxfp4", num_bits=4, group_size=32)),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        WeightScheme(packing="nf4", kind="nf4", num_bits=4, group_size=64),
    ),
    "bitsandbytes of 8 bits": (
        {"load_in_8bit": True, "load_in_4bit": False}, WeightScheme(packing="int8_rows", kind="int", num_bits=8)
    ),
    "packed, asymmetric": (
        tensors("pack-quantized", {"strategy": "group", "group_size": 32, "symmetric": False, "actorder": "group"}),
        WeightScheme(packing="pack-quantized", kind="int", num_bits=4, group_size=32, is_symmetric=False),
    ),
    "int8 by channel": (
        tensors("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        WeightScheme(packing="plain", kind="int", num_bits=8),
    ),
    "float8": (
        tensors("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        WeightScheme(packing="plain", kind="fp8", num_bits=8),
    ),
    "float8 in blocks": (
        tensors("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": "128x64"}),
        WeightScheme(packing="blocks", kind="fp8", num_bits=8, group_size=64, block_rows=128),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "scheme"), READ.values(), ids=READ.keys())
def test_every_format_becomes_a_scheme(config: dict[str, Any], scheme: WeightScheme):
    assert only_scheme(config) == scheme


def test_groups_of_modules_may_differ():
    mixed = tensors("mixed-precision", {"strategy": "group", "group_size": 64})
    mixed["config_groups"]["group_0"]["format"] = "pack-quantized"
    inputs = {"num_bits": 8, "dynamic": False}
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    mixed["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj"], "weights": weights, "format": "float-quantized", "input_activations": inputs,
    }  # fmt: skip
    assert read_quantization({"compression_config": mixed}) == CheckpointQuantization(
        method="compressed-tensors",
        schemes=(
            WeightScheme(packing="pack-quantized", kind="int", num_bits=4, group_size=64),
            WeightScheme(packing="plain", kind="fp8", num_bits=8),
        ),
        has_static_inputs=True,
    )


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ([], "quantization_config"),
    "unknown": ({"quant_method": "aqlm"}, "quant_method"),
    "no method": ({"bits": 4}, "quant_method"),
    "gptq without bits": ({**GPTQ, "bits": None}, "bits"),
    "gptq of 3 bits": ({**GPTQ, "bits": 3}, "bits"),
    "gptq in groups of 48": ({**GPTQ, "group_size": 48}, "group_size"),
    "gptq for one kernel": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format"),
    "gptq of several bits": ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
    "awq for other kernels": ({**AWQ, "version": "gemv"}, "version"),
    "awq of 8 bits": ({**AWQ, "bits": 8}, "bits"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt"),
    "blocks of one number": ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
    "blocks of 100": ({**FP8, "weight_block_size": [128, 100]}, "weight_block_size"),
    "fp4": ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
    "no groups": (tensors("pack-quantized", {}, config_groups={}), "config_groups"),
    "marlin-24": (tensors("marlin-24", {}), "format"),
    "nvfp4": (tensors("nvfp4-pack-quantized", {}), "format"),
    "sparse": (tensors("pack-quantized", {}, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "rotated": (tensors("pack-quantized", {}, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "2 bits": (tensors("pack-quantized", {"num_bits": 2}), "num_bits"),
    "fp4 floats": (tensors("float-quantized", {"type": "float", "num_bits": 4}), "num_bits"),
    "groups without size": (tensors("pack-quantized", {"strategy": "group"}), "group_size"),
    "integers in blocks": (tensors("int-quantized", {"num_bits": 8, "strategy": "block"}), "strategy"),
    "blocks of other digits": (
        tensors("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": "\u00b2x4"}),
        "block_structure",
    ),
    "floats in groups": (tensors("float-quantized", {"type": "float", "num_bits": 8, "group_size": 128}), "strategy"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_read_is_refused_by_field(config: Any, field: str):
    with pytest.raises(ModelError) as error:
        read_quantization({"quantization_config": config})
    assert error.value.field == field
    assert error.value.hint
