"""Checkpoints in compressed-tensors, FP8 and bitsandbytes' formats, made from tiny ones, with the numbers they mean.

Used by the tests of quantized checkpoints. A `Writer` takes a matrix and gives the tensors that stand for it, by the
ends of their names, and its meaning; both are computed here, by other code than the readers'.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
Writer = Callable[[torch.Tensor], Written]

NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A format.

    Attributes:
        settings: `quantization_config` of config.json.
        write: one matrix.
    """

    settings: dict[str, Any]
    write: Writer


def make_quantized(checkpoint: Path, directory: Path, kind: Kind) -> dict[str, torch.Tensor]:
    """Write a checkpoint with its projections in a format; the numbers of all tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    written: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            written[name] = meant[name] = weight
            continue
        parts, meant[name] = kind.write(weight.float())
        written.update({name.removesuffix(".weight") + end: part.contiguous() for end, part in parts.items()})
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, directory / file.name)
    config = json.loads((checkpoint / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": kind.settings}))
    save_file(written, directory / "model.safetensors", {"format": "pt"})
    return meant


def compressed(format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """`quantization_config` with one group of modules."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def packed(
    num_bits: int, group_size: int, *, is_symmetric: bool = True, has_order: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> Kind:  # fmt: skip
    """pack-quantized."""
    weights = {
        "num_bits": num_bits, "type": "int", "symmetric": is_symmetric, "group_size": group_size or None,
        "strategy": "group" if group_size else "channel", "actorder": "group" if has_order else None,
    }  # fmt: skip
    low, high = -(1 << (num_bits - 1)), (1 << (num_bits - 1)) - 1

    def write(weight: torch.Tensor) -> Written:
        rows, inputs = weight.shape
        size = group_size or inputs
        groups = torch.arange(inputs) // size
        if has_order:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(rows))]
        codes, numbers = torch.empty(rows, inputs, dtype=torch.int64), torch.empty(rows, inputs)
        count = -(-inputs // size)
        scales, zeros = torch.empty(rows, count, dtype=scale_dtype), torch.zeros(rows, count, dtype=torch.int64)
        for group in range(count):
            columns = (groups == group).nonzero()[:, 0]
            given = weight[:, columns]
            bottom, top = given.amin(1).clamp(max=0), given.amax(1).clamp(min=0)
            span = torch.maximum(-bottom, top) * 2 if is_symmetric else top - bottom
            scales[:, group] = (span / (high - low)).to(scale_dtype)
            scale = scales[:, group].float()[:, None]
            if not is_symmetric:
                zeros[:, group] = (low - torch.round(bottom / scale[:, 0])).clamp(low, high).long()
            zero = zeros[:, group, None]
            codes[:, columns] = (torch.round(given / scale) + zero).clamp(low, high).long()
            numbers[:, columns] = (codes[:, columns] - zero).float() * scale
        parts = {
            ".weight_packed": to_words(codes - low, num_bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor([rows, inputs]),
        }
        if not is_symmetric:
            parts[".weight_zero_point"] = to_words((zeros - low).t(), num_bits).t()
        if has_order:
            parts[".weight_g_idx"] = groups.int()
        return parts, numbers

    return Kind(compressed("pack-quantized", weights), write)


def to_words(fields: torch.Tensor, num_bits: int) -> torch.Tensor:
    """[n, size] -> [n, ceil(size * num_bits / 32)] int32, the first field in the lowest bits."""
    per_word = 32 // num_bits
    out = torch.zeros(fields.shape[0], -(-fields.shape[1] // per_word), dtype=torch.int64)
    for i in range(fields.shape[1]):
        out[:, i // per_word] |= fields[:, i] << (i % per_word * num_bits)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


def int8(strategy: str = "channel", *, group_size: int = 0, is_static: bool = False, has_zeros: bool = False) -> Kind:
    """int-quantized: W8A8."""
    weights = {
        "num_bits": 8, "type": "int", "symmetric": not has_zeros, "strategy": strategy,
        "group_size": group_size or None,
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    if is_static:
        inputs |= {"strategy": "tensor", "dynamic": False}

    def write(weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        size = group_size or columns
        groups = weight.view(1, 1, -1) if strategy == "tensor" else weight.view(rows, columns // size, size)
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scales = (high - low) / 255 if has_zeros else torch.maximum(-low, high) / 127
        zeros = torch.round(-128 - low / scales).clamp(-128, 127) if has_zeros else torch.zeros_like(scales)
        codes = torch.round(groups / scales + zeros).clamp(-128, 127)
        numbers = ((codes - zeros) * scales).view(rows, columns)
        flat = scales.flatten() if strategy == "tensor" else scales[..., 0]
        parts = {".weight": codes.view(rows, columns).to(torch.int8), ".weight_scale": flat}
        if has_zeros:
            parts[".weight_zero_point"] = zeros[..., 0].to(torch.int8)
        if is_static:
            parts |= {".input_scale": torch.tensor([0.02]), ".input_zero_point": torch.tensor([0], dtype=torch.int8)}
        return parts, numbers

    return Kind(compressed("int-quantized", weights, inputs), write)


def fp8(strategy: str = "channel", *, block: int = 0, is_native: bool = False) -> Kind:
    """Eight-bit floats: of compressed-tensors, or (`is_native`) of DeepSeek and vLLM."""
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if block:
        weights |= {"block_structure": [block, block]}
    settings = compressed("float-quantized", weights, {"num_bits": 8, "type": "float", "dynamic": True})
    if is_native:
        settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        settings |= {"weight_block_size": [block, block]} if block else {}

    def write(weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (block, block)}[strategy]
        scales = torch.empty(-(-rows // height), -(-columns // width))
        codes, numbers = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
                scales[i, j] = weight[place].abs().max() / 448
                codes[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
                numbers[place] = codes[place].float() * scales[i, j]
        if strategy == "tensor":
            scales = scales[0, 0] if is_native else scales[0]
        return {".weight": codes, ".weight_scale_inv" if is_native and block else ".weight_scale": scales}, numbers

    return Kind(settings, write)


def nf4(*, is_nested: bool = True, block_size: int = 32) -> Kind:
    """bitsandbytes' 4 bits."""
    settings = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": is_nested,
    }  # fmt: skip
    table = torch.linspace(-1, 1, 256)

    def write(weight: torch.Tensor) -> Written:
        blocks = weight.reshape(-1, block_size)
        largest = blocks.abs().amax(1)
        codes = (blocks[..., None] / largest[:, None, None] - NF4).abs().argmin(-1)
        state: dict[str, Any] = {
            "quant_type": "nf4", "blocksize": block_size, "dtype": "bfloat16", "shape": list(weight.shape),
        }  # fmt: skip
        parts = {".weight.quant_map": NF4.clone()}
        if is_nested:
            offset = float(largest.mean())
            count = len(largest)
            outer = torch.stack([part.abs().max() for part in (largest - offset).split(16)])
            wide = outer.repeat_interleave(16)[:count]
            inner = ((largest - offset)[:, None] / wide[:, None] - table).abs().argmin(1)
            largest = table[inner] * wide + offset
            state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {
                ".weight.absmax": inner.to(torch.uint8), ".weight.nested_absmax": outer,
                ".weight.nested_quant_map": table.clone(),
            }  # fmt: skip
        else:
            parts[".weight.absmax"] = largest
        flat = codes.flatten().to(torch.uint8)
        parts[".weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
        parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        )
        return parts, (NF4[codes] * largest[:, None]).view(weight.shape)

    return Kind(settings, write)


def int8_rows() -> Kind:
    """bitsandbytes' 8 bits."""

    def write(weight: torch.Tensor) -> Written:
        largest = weight.abs().amax(1)
        codes = torch.round(weight / largest[:, None] * 127)
        numbers = codes * largest[:, None] / 127
        return {".weight": codes.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(0).byte()}, numbers

    return Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, write)


def gptq8(group_size: int, *, is_symmetric: bool = True) -> Kind:
    """GPTQ with 8 bits; zero points are stored less one."""
    settings = {"quant_method": "gptq", "bits": 8, "group_size": group_size, "sym": is_symmetric, "desc_act": False}

    def write(weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        groups = weight.view(rows, columns // group_size, group_size)
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        if is_symmetric:
            scales, zeros = (torch.maximum(-low, high) / 127).half().float(), torch.full_like(low, 128)
        else:
            scales = ((high - low) / 255).half().float()
            zeros = torch.round(-low / scales).clamp(1, 255)
        codes = torch.round(groups / scales + zeros).clamp(0, 255)
        parts = {
            ".qweight": to_words(codes.view(rows, columns).long(), 8).t(),
            ".qzeros": to_words(zeros[..., 0].t().long() - 1, 8),
            ".scales": scales[..., 0].t().half(),
        }
        return parts, ((codes - zeros) * scales).view(rows, columns)

    return Kind(settings, write)


KINDS: dict[str, Kind] = {
    "packed in groups of 32": packed(4, 32),
    "packed with zero points": packed(4, 32, is_symmetric=False),
    "packed by row": packed(4, 0),
    "packed in act-order": packed(4, 32, is_symmetric=False, has_order=True, scale_dtype=torch.float32),
    "packed 8 bits": packed(8, 32),
    "packed 8 bits with zero points": packed(8, 32, is_symmetric=False),
    "int8": int8(),
    "int8 with static inputs": int8(is_static=True),
    "int8 by matrix": int8("tensor"),
    "int8 in groups": int8("group", group_size=32),
    "int8 with zero points": int8(has_zeros=True),
    "fp8 by matrix": fp8("tensor"),
    "fp8": fp8(),
    "fp8 in blocks": fp8("block", block=32),
    "fp8 in DeepSeek's blocks": fp8("block", block=32, is_native=True),
    "fp8 by matrix, as vLLM writes it": fp8("tensor", is_native=True),
    "nf4": nf4(),
    "nf4 with plain scales": nf4(is_nested=False),
    "nf4 across rows": nf4(is_nested=False, block_size=128),
    "int8 of bitsandbytes": int8_rows(),
    "gptq of 8 bits": gptq8(32),
    "gptq of 8 bits with zero points": gptq8(32, is_symmetric=False),
}
