"""How many bytes the KV cache may take: what is free, less weights and the workspace of the largest step.

Called by the worker's memory planner before and after the model is loaded, and by `quire inspect`. Pure functions; the
numbers come in as arguments. The workspace is computed, not measured: a trial run of the largest step would take
minutes on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.model_arch import ModelArch
from quire.core.drafts import most_drafts
from quire.errors import NotEnoughMemoryError
from quire.utils.memory import GIB, MIB, format_bytes

# Thread stacks, libraries that load late, and freed memory that the allocator keeps (see `allocator`).
RESERVED_BYTES = 256 * MIB
# Buffers of the attention backend that do not grow with the model (tiles, masks, scores of one run).
ATTENTION_BYTES = 96 * MIB
# Float32 logits, their copy, float64 running sums, sort keys of log-probabilities: bytes per logit at the worst moment.
SAMPLING_BYTES_PER_LOGIT = 32
# Buffers of recorded steps, which the native kernels replay.
RECORDED_STEPS_BYTES = 64 * MIB
# Bytes per weight of projections and of token tables, scales included, by quantization.
# None: as without quantization.
WEIGHT_BYTES: Mapping[str | None, tuple[float, float | None]] = {
    "int8": (1.01, 1.01), "int4": (0.54, 1.01), "fp8": (1.01, None), "bitsandbytes": (0.57, None),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest step: requests, tokens, tokens of one request, drafts of one request (0 = there are none) and of all
    (None = `core.drafts.most_drafts`).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_drafts: int = 0
    max_step_drafts: int | None = None

    @property
    def max_num_logits(self) -> int:
        """Most rows of logits of a step."""
        most = most_drafts(self.max_num_seqs, self.max_step_drafts)
        num_drafts = min(self.max_num_seqs * self.num_drafts, most)
        return min(self.max_num_seqs + num_drafts, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Where the memory goes.

    Attributes:
        free_bytes: what the process could take before the model was loaded.
        utilization: share of it that the engine may use.
        weights_bytes, workspace_bytes, swap_bytes: taken off first; the last is a swap space in the same memory.
        kv_cache_bytes: what the KV cache may take.
        useful_bytes: what `max_num_seqs` requests of `max_model_len` tokens would fill; None = no such cap.
    """

    free_bytes: int
    utilization: float
    weights_bytes: int
    workspace_bytes: int
    kv_cache_bytes: int
    useful_bytes: int | None
    swap_bytes: int = 0

    def describe(self) -> str:
        """One line: what was chosen and why."""
        left = f"{format_bytes(self.free_bytes)} free x {self.utilization:.2f}"
        taken = f"{format_bytes(self.weights_bytes)} weights - {format_bytes(self.workspace_bytes)} workspace"
        if self.swap_bytes:
            taken += f" - {format_bytes(self.swap_bytes)} swap space"
        is_capped = self.kv_cache_bytes == self.useful_bytes
        reason = "; limited by max_num_seqs requests of max_model_len tokens" if is_capped else ""
        return f"memory for the KV cache: {format_bytes(self.kv_cache_bytes)} ({left} - {taken}{reason})"


def estimate_weights_bytes(
    arch: ModelArch,
    max_model_len: int,
    dtype_bytes: int,
    quantization: str | None = None,
    stored_bytes: int | None = None,
) -> int:
    """Bytes of a model's parameters and rotary tables, before it is built.

    Args:
        stored_bytes: of the files, where matrices stay in the checkpoint's own formats; None = they do not.
    """
    rotary_sizes = {layer.rope: layer.head_size for layer in arch.attention_layers if layer.rope is not None}
    rotary_bytes = 4 * max_model_len * sum(rotary_sizes.values())
    layer_bytes, table_bytes = bytes_per_weight(arch, dtype_bytes, quantization)
    norms = 2 * arch.num_layers * arch.hidden_size * dtype_bytes
    tables = arch.num_table_weights + arch.embedding.num_positions * arch.hidden_size
    matrices = int(arch.num_layer_weights * layer_bytes + tables * table_bytes)
    return (matrices if stored_bytes is None else min(matrices, stored_bytes)) + norms + rotary_bytes


def bytes_per_weight(arch: ModelArch, dtype_bytes: int, quantization: str | None) -> tuple[float, float]:
    """Of projections and of token tables, as they are kept in memory."""
    if arch.quantization is not None:  # without kernels of that format, float32 among them, it is as plain numbers
        return arch.quantization.bytes_per_weight if dtype_bytes == 2 else dtype_bytes, dtype_bytes
    layer_bytes, table_bytes = WEIGHT_BYTES.get(quantization, (dtype_bytes, None))
    return layer_bytes, dtype_bytes if table_bytes is None else table_bytes


def estimate_workspace_bytes(arch: ModelArch, limits: StepLimits, dtype_bytes: int) -> int:
    """Bytes that the largest step needs besides weights and cache: activations, attention, logits and sampling."""
    attention = arch.attention_layers
    heads_size = max((layer.num_heads * layer.head_size for layer in attention), default=0)
    kv_size = max((layer.num_kv_heads * layer.head_size for layer in attention), default=0)
    mixer_size = max((part.width for layer in arch.layers for _, part in layer.mixers()), default=0)
    ffn_size = max((part.width for layer in arch.layers for _, part in layer.feed_forwards()), default=0)
    # The residual stream and projections in the model's type; norms, rotation and activation go through float32.
    elements = 4 * arch.hidden_size + 2 * mixer_size + 3 * ffn_size
    float32_elements = 2 * max(arch.hidden_size + heads_size, ffn_size)
    activations = limits.max_num_batched_tokens * (elements * dtype_bytes + float32_elements * 4)
    # Keys and values of one long request, gathered from their blocks and repeated per query head.
    gathered = 2 * limits.max_model_len * (kv_size + heads_size) * dtype_bytes
    sampling = limits.max_num_logits * arch.vocab_size * SAMPLING_BYTES_PER_LOGIT
    return RESERVED_BYTES + ATTENTION_BYTES + max(activations + gathered, sampling)


def drawn_drafts_bytes(max_num_seqs: int, num_drafts: int, vocab_size: int) -> int:
    """Bytes of the float32 distributions that drafts were drawn from, where `SpeculativeConfig.draws_drafts`.

    Args:
        num_drafts: of a row at once: `SpeculativeConfig.num_tokens`.
    """
    return max_num_seqs * num_drafts * vocab_size * 4


def plan_memory(
    *,
    free_bytes: int,
    utilization: float,
    weights_bytes: int,
    workspace_bytes: int,
    useful_bytes: int | None,
    swap_bytes: int = 0,
) -> MemoryBudget:
    """Divide the memory.

    Args:
        useful_bytes: more than this would never be read; None = take all there is.
        swap_bytes: of a swap space in this memory.

    Raises:
        NotEnoughMemoryError: nothing is left for the KV cache; says what would work.
    """
    left = int(free_bytes * utilization) - weights_bytes - workspace_bytes
    if left <= 0:
        raise _no_room(free_bytes, utilization, weights_bytes, workspace_bytes)
    check_swap_space(swap_bytes, left)
    left -= swap_bytes
    return MemoryBudget(
        free_bytes=free_bytes,
        utilization=utilization,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace_bytes,
        kv_cache_bytes=left if useful_bytes is None else min(left, useful_bytes),
        useful_bytes=useful_bytes,
        swap_bytes=swap_bytes,
    )


def check_swap_space(swap_bytes: int, free_bytes: int, name: str = "swap_space") -> None:
    """Refuse a swap space, or another setting's memory in GiB, that leaves nothing of the memory it would be in.

    Raises:
        NotEnoughMemoryError: names the largest size that fits.
    """
    if swap_bytes and swap_bytes >= free_bytes:
        most = max(0, int(100 * free_bytes / GIB) - 1) / 100
        raise NotEnoughMemoryError(
            f"{name}={swap_bytes / GIB:g} GiB does not fit: {format_bytes(max(0, free_bytes))} is available",
            hint=f"use {name} <= {most:g}, or free memory" if most else f"use {name}=0, or free memory",
            field=name,
        )


def check_allocation(needed_bytes: int, free_bytes: int, workspace_bytes: int, swap_bytes: int = 0) -> None:
    """Refuse a KV cache, of a size that the user gave, that the machine cannot hold beside workspace and swap space.

    Raises:
        NotEnoughMemoryError: names the largest size that fits.
    """
    most = free_bytes - workspace_bytes - swap_bytes
    if needed_bytes > most:
        swap = f" and {format_bytes(swap_bytes)} swap space" if swap_bytes else ""
        raise NotEnoughMemoryError(
            f"a KV cache of {format_bytes(needed_bytes)} does not fit: {format_bytes(free_bytes)} is free, "
            f"of which {format_bytes(workspace_bytes)} is workspace{swap}",
            hint=f"use kv_cache_memory_bytes <= {max(0, most)}, or fewer blocks (num_gpu_blocks_override)"
            + (", or less swap_space" if swap_bytes else ""),
            field="kv_cache_memory_bytes",
        )


def _no_room(free_bytes: int, utilization: float, weights_bytes: int, workspace_bytes: int) -> NotEnoughMemoryError:
    needed_bytes = weights_bytes + workspace_bytes
    usable = f"{format_bytes(free_bytes)} is free and gpu_memory_utilization={utilization:.2f} of it may be used"
    hints = [f"free memory until {format_bytes(int(needed_bytes / utilization) + 1)} is available"]
    if needed_bytes < free_bytes:
        hints.insert(0, f"raise gpu_memory_utilization above {needed_bytes / free_bytes:.2f}")
    if weights_bytes < free_bytes * utilization:
        hints.insert(0, "lower max_num_batched_tokens or max_num_seqs")
    else:
        hints.append("use a smaller model")
    return NotEnoughMemoryError(
        f"the model needs {format_bytes(weights_bytes)} for weights and {format_bytes(workspace_bytes)} for "
        f"workspace, plus the KV cache; {usable}",
        hint=", or ".join(hints),
        field="gpu_memory_utilization",
    )
