"""AWQ and GPTQ checkpoints made from tiny ones, with the numbers that they mean.

Used by the tests of 4-bit checkpoints. Layouts are those of AutoAWQ's "gemm" version, and of AutoGPTQ and GPTQModel.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.models.gguf_files import Numbers, load_tensors

# Every projection of the layers; embeddings, head, norms and routers stay as they are.
QUANTIZED = re.compile(r"\.layers\.\d+\..*(_proj|\.w[123])\.weight$")
CODES_IN_WORD = 8
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each half byte of a word has, from the lowest


def make_awq(checkpoint: Path, directory: Path, group_size: int = 32, *, has_zeros: bool = True) -> Numbers:
    """Write a checkpoint with AWQ's 4-bit weights, and return the numbers that it means.

    Args:
        has_zeros: else groups are symmetric, with the zero point 8.
    """
    written, meant = {}, {}
    for name, weight in load_tensors(checkpoint).items():
        if not QUANTIZED.search(name):
            written[name] = weight.half()
            meant[name] = weight.half().float()
            continue
        codes, zeros, scales = _quantize(weight.float(), group_size, has_zeros)
        base = name.removesuffix(".weight")
        order = torch.tensor(AWQ_ORDER)
        written[f"{base}.qweight"] = _pack_last(codes.t().contiguous(), order)
        written[f"{base}.qzeros"] = _pack_last(zeros.t().contiguous(), order)
        written[f"{base}.scales"] = scales.t().contiguous()
        meant[name] = _dequantize(codes, zeros, scales, torch.arange(weight.shape[1]) // group_size)
    settings = {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": has_zeros, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    _write(checkpoint, directory, written, settings)
    return meant


def make_gptq(
    checkpoint: Path,
    directory: Path,
    group_size: int = 32,
    *,
    has_act_order: bool = False,
    has_zeros: bool = True,
    version: int = 1,
    seed: int = 0,
) -> Numbers:
    """Write a checkpoint with GPTQ's 4-bit weights, and return the numbers that it means.

    Args:
        group_size: -1 = the whole row.
        has_act_order: the inputs of a group are anywhere in the row (`desc_act`), else consecutive.
        has_zeros: else groups are symmetric, with the zero point 8.
        version: of the format; in 1 zero points are stored less one.
    """
    generator = torch.Generator().manual_seed(seed)
    written, meant = {}, {}
    for name, weight in load_tensors(checkpoint).items():
        if not QUANTIZED.search(name):
            written[name] = weight.half()
            meant[name] = weight.half().float()
            continue
        input_size = weight.shape[1]
        size = group_size if group_size > 0 else input_size
        groups = torch.arange(input_size) // size
        order = torch.randperm(input_size, generator=generator) if has_act_order else torch.arange(input_size)
        codes, zeros, scales = _quantize(weight.float()[:, order], size, has_zeros)
        in_place, group_of = torch.empty_like(codes), torch.empty_like(groups)
        in_place[:, order], group_of[order] = codes, groups
        base = name.removesuffix(".weight")
        stored_zeros = (zeros - 1) % 16 if version == 1 else zeros
        written[f"{base}.qweight"] = _pack_last(in_place).t().contiguous()
        written[f"{base}.qzeros"] = _pack_last(stored_zeros.t().contiguous())
        written[f"{base}.scales"] = scales.t().contiguous()
        written[f"{base}.g_idx"] = group_of.int()
        meant[name] = _dequantize(in_place, zeros, scales, group_of)
    settings = {
        "quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": has_act_order, "sym": not has_zeros,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2", "lm_head": False,
    }  # fmt: skip
    _write(checkpoint, directory, written, settings)
    return meant


def _quantize(
    weight: torch.Tensor, group_size: int, has_zeros: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """By the range of each group: codes [num_rows, input_size], zeros and float16 scales [num_rows, num_groups]."""
    groups = weight.reshape(weight.shape[0], -1, group_size)
    if has_zeros:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = torch.round(-low / scales.float()).clamp(1, 15)  # version 1 of GPTQ's format has no zero point 0
    else:
        scales = (groups.abs().amax(2) / 7.5).half()
        zeros = torch.full_like(scales, 8.0)
    codes = torch.round(groups / scales.float()[..., None] + zeros.float()[..., None]).clamp(0, 15)
    return codes.reshape(weight.shape).int(), zeros.int(), scales


def _dequantize(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
    return (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]


def _pack_last(codes: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
    """Eight codes of the last dimension to an int32, from the lowest bits: [..., n] -> [..., n // 8]."""
    words = codes.long().unflatten(-1, (-1, CODES_IN_WORD))
    if order is not None:
        words = words[..., order]
    packed = (words << (4 * torch.arange(CODES_IN_WORD))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _write(checkpoint: Path, directory: Path, tensors: Numbers, settings: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and "index" not in file.name:
            shutil.copy(file, directory / file.name)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"dtype": "float16", "quantization_config": settings}
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
