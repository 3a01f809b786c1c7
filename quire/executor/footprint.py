"""How much memory a model takes, and how much of the disk, found before it is loaded. Pure but for the files' sizes.

Called where models are switched; loads no torch. Weights are counted from the architecture, or by their files where
these are stored in a form that is kept as it is; workspace as the worker plans it.
"""

from __future__ import annotations

import dataclasses
import glob
import re
from dataclasses import dataclass
from pathlib import Path

from quire.config import QuireConfig
from quire.config.model_arch import AttentionArch
from quire.core.memory_budget import StepLimits, estimate_weights_bytes, estimate_workspace_bytes

WEIGHT_SUFFIXES = (".safetensors", ".gguf")
GGUF_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")
BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_SHARE = 8
"""A model without a setting for its KV cache gets this part of the memory budget, an eighth, or what one request of the
greatest length needs."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes.

    Attributes:
        num_bytes: memory while it is loaded: weights, KV cache and workspace.
        file_bytes: of its weights on disk.
        kv_cache_bytes: of that memory, the KV cache's.
    """

    num_bytes: int
    file_bytes: int
    kv_cache_bytes: int


def footprint_of(config: QuireConfig, kv_share_bytes: int, *, is_stored: bool = False) -> Footprint:
    """The footprint of a resolved configuration.

    Args:
        kv_share_bytes: for the KV cache, where the settings do not say.
        is_stored: the weights are quantized on disk and kept so.
    """
    assert config.arch is not None, "resolve() sets the architecture"
    dtype_bytes = BYTES_OF.get(config.model.dtype, 4)
    limits = StepLimits(
        max_num_seqs=config.scheduler.max_num_seqs or 1,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens or config.max_model_len,
        max_model_len=config.max_model_len,
        num_drafts=config.num_draft_tokens,
        max_step_drafts=config.max_step_drafts,
    )
    file_bytes = weight_file_bytes(Path(config.model_path))
    weights = estimate_weights_bytes(config.arch, config.max_model_len, dtype_bytes, config.model.quantization)
    if is_stored and file_bytes and config.model.dtype == "bfloat16":
        weights = file_bytes
    kv_cache = _kv_cache_bytes(config, kv_share_bytes)
    workspace = estimate_workspace_bytes(config.arch, limits, dtype_bytes)
    return Footprint(weights + kv_cache + workspace, file_bytes, kv_cache)


def weight_file_bytes(path: Path) -> int:
    """Size of the weights in a directory, or of a file; of one part of a split GGUF file, that of all parts."""
    part = GGUF_PART.fullmatch(path.name)
    if part is not None:
        files = list(path.parent.glob(f"{glob.escape(part[1])}-?????-of-{part[2]}.gguf"))
    else:
        files = [path] if path.is_file() else list(path.iterdir()) if path.is_dir() else []
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES)


def with_kv_cache_bytes(config: QuireConfig, num_bytes: int) -> QuireConfig:
    """`config` with a KV cache of so many bytes, unless its settings say how large it is."""
    cache = config.cache
    if cache.kv_cache_memory_bytes is not None or cache.num_blocks is not None:
        return config
    return dataclasses.replace(config, cache=dataclasses.replace(cache, kv_cache_memory_bytes=num_bytes))


def _kv_cache_bytes(config: QuireConfig, share_bytes: int) -> int:
    """What the settings say; else the share, between one request of the greatest length and as many as there can be."""
    cache, token_bytes = config.cache, _bytes_of_a_token(config)
    if cache.num_blocks is not None:
        return cache.num_blocks * (cache.block_size or 1) * (token_bytes or 0)
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes
    if token_bytes is None:
        return share_bytes
    block_size = cache.block_size or 1
    block_bytes, blocks_of_one = block_size * token_bytes, -(-config.max_model_len // block_size)
    most_bytes = ((config.scheduler.max_num_seqs or 1) * blocks_of_one + 1) * block_bytes
    return min(most_bytes, max(share_bytes, (blocks_of_one + 1) * block_bytes))


def _bytes_of_a_token(config: QuireConfig) -> int | None:
    """Keys and values of a token in all layers; None where layers keep something else."""
    assert config.arch is not None, "resolve() sets the architecture"
    size = BYTES_OF.get(config.cache.kv_cache_dtype, 4)
    total = 0
    for layer in config.arch.layers:
        for _, mixer in layer.mixers():
            if not isinstance(mixer, AttentionArch):
                return None
            if mixer.shares_cache_of is None:
                total += 2 * mixer.num_kv_heads * mixer.head_size * size
    return total
