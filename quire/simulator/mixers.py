"""What the mixers of a model keep in the KV cache, and what they read and compute besides their projections.

Called by the roofline. Pure functions of a `ModelArch`: the models themselves, which need torch, declare the same specs
(`tests/models/families` compares them).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from quire.config.model_arch import (
    AttentionArch,
    GatedDeltaNetArch,
    LatentAttentionArch,
    MambaArch,
    Mixer,
    ModelArch,
    ShortConvArch,
)
from quire.core.kv_spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from quire.simulator.costs import StepShape
from quire.simulator.division import divides_heads

FLOAT32_BYTES = 4
# Channels that the states of Mamba 1 are padded to a multiple of (`kernels.state_layout`).
MAMBA1_LANES = 16
# Operations for each element of a recurrent state and token: decay, update, and the product that is read.
STATE_FLOPS = 6


def cache_specs(
    arch: ModelArch, block_size: int, item_bytes: int, *, num_ranks: int = 1, layers: range | None = None
) -> dict[str, KVCacheSpec]:
    """Name -> what it needs from the KV cache, on one rank.

    Args:
        item_bytes: bytes of a number in the model's type.
        num_ranks: heads are divided among so many; latents and states are kept by each.
        layers: of a pipeline stage; None = all.
    """
    specs: dict[str, KVCacheSpec] = {}
    for number in range(arch.num_layers) if layers is None else layers:
        for name, mixer in arch.layers[number].mixers():
            if not (isinstance(mixer, AttentionArch) and mixer.shares_cache_of is not None):
                specs[f"layer {number} {name}"] = _spec(arch, mixer, block_size, item_bytes, num_ranks)
    return specs


def of_drafts(specs: dict[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Those of a drafting model, by other names; whole sequences are kept, as what is missing may yet be filled."""
    return {f"draft {name}": spec.unwindowed() for name, spec in specs.items()}


def _spec(arch: ModelArch, mixer: Mixer, block_size: int, item_bytes: int, num_ranks: int) -> KVCacheSpec:
    if isinstance(mixer, LatentAttentionArch):
        width = mixer.latent_size + mixer.rope_size
        return MLAAttentionSpec(block_size=block_size, head_size=width, dtype_bytes=item_bytes)
    if isinstance(mixer, AttentionArch):
        return _attention_spec(mixer, block_size, item_bytes, _num_ranks_of_heads(arch, mixer, num_ranks))
    shapes, sizes = _state(arch, mixer, item_bytes)
    return MambaSpec(block_size=block_size, shapes=shapes, dtype_bytes=sizes)


def _attention_spec(mixer: AttentionArch, block_size: int, item_bytes: int, num_ranks: int) -> KVCacheSpec:
    shape = {
        "block_size": block_size, "num_kv_heads": max(1, mixer.num_kv_heads // num_ranks),
        "head_size": mixer.head_size, "dtype_bytes": item_bytes,
    }  # fmt: skip
    if mixer.chunk is not None:
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=mixer.chunk)
    if mixer.window is not None:
        return SlidingWindowSpec(**shape, sliding_window=mixer.window)
    return FullAttentionSpec(**shape)


def _num_ranks_of_heads(arch: ModelArch, mixer: AttentionArch, num_ranks: int) -> int:
    """Among which heads are divided; 1 where every rank computes all."""
    return num_ranks if num_ranks > 1 and divides_heads(arch, mixer, num_ranks) else 1


def _state(arch: ModelArch, mixer: Mixer, item_bytes: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Shapes and bytes of a number of what a recurrent layer keeps of a request, on every rank."""
    if isinstance(mixer, ShortConvArch):
        return ((mixer.conv_size - 1, arch.hidden_size),), (item_bytes,)
    state: tuple[int, ...]
    if isinstance(mixer, GatedDeltaNetArch):
        state, channels = (mixer.num_value_heads, mixer.key_size, mixer.value_size), mixer.conv_width
    else:
        assert isinstance(mixer, MambaArch), "the last kind of mixer"
        channels = mixer.inner_size
        state = (-(-channels // MAMBA1_LANES), mixer.state_size, MAMBA1_LANES)
        if mixer.version == 2:
            state = (mixer.num_heads, mixer.state_size, mixer.head_size)
            channels += 2 * mixer.num_groups * mixer.state_size
    return (state, (mixer.conv_size - 1, channels)), (FLOAT32_BYTES, item_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerCost:
    """What one mixer reads and computes on one rank, besides its projections.

    Attributes:
        seen: most tokens that a query sees, itself included; 0 = all.
        key_bytes: read for each (query, key) pair of a decoding request.
        decode_flops, prompt_flops: for each such pair, and for each of a prompt.
        state_bytes: of a request's state, which a step reads and writes.
        token_flops: for each token, of a recurrence.
    """

    seen: int = 0
    key_bytes: float = 0.0
    decode_flops: float = 0.0
    prompt_flops: float = 0.0
    state_bytes: float = 0.0
    token_flops: float = 0.0

    def seconds(self, shape: StepShape, flops: float, bandwidth: float) -> float:
        """Of a step; decoding requests and prompts one after the other."""
        num_decoding = shape.num_tokens - shape.num_prompt_tokens
        context, pairs = float(shape.decode_context), shape.prompt_pairs
        if self.seen:
            context, pairs = min(context, num_decoding * self.seen), min(pairs, shape.num_prompt_tokens * self.seen)
        decode = max(context * self.key_bytes / bandwidth, context * self.decode_flops / flops)
        states = 2 * shape.num_rows * self.state_bytes / bandwidth + shape.num_tokens * self.token_flops / flops
        return decode + pairs * self.prompt_flops / flops + states


def mixer_costs(arch: ModelArch, item_bytes: int, num_ranks: int) -> list[tuple[int, MixerCost]]:
    """How often the model has a mixer, and what that costs on one rank."""
    mixers = [mixer for layer in arch.layers for _, mixer in layer.mixers()]
    counted = Counter(_cost(arch, mixer, item_bytes, num_ranks) for mixer in mixers)
    return [(count, cost) for cost, count in counted.items()]


def _cost(arch: ModelArch, mixer: Mixer, item_bytes: int, num_ranks: int) -> MixerCost:
    if isinstance(mixer, LatentAttentionArch):
        heads, width = mixer.num_heads, mixer.latent_size + mixer.rope_size  # latents are read by every rank
        return MixerCost(
            key_bytes=width * item_bytes, decode_flops=2 * heads * (width + mixer.latent_size),
            prompt_flops=2 * heads * (mixer.nope_size + mixer.rope_size + mixer.value_size),
        )  # fmt: skip
    if isinstance(mixer, AttentionArch):
        num_ranks = _num_ranks_of_heads(arch, mixer, num_ranks)
        flops = 4 * mixer.num_heads * mixer.head_size / num_ranks
        kv_heads = max(1, mixer.num_kv_heads // num_ranks)
        return MixerCost(
            seen=mixer.chunk or mixer.window or 0, key_bytes=2 * kv_heads * mixer.head_size * item_bytes,
            decode_flops=flops, prompt_flops=flops,
        )  # fmt: skip
    shapes, sizes = _state(arch, mixer, item_bytes)
    spec = MambaSpec(block_size=1, shapes=shapes, dtype_bytes=sizes)
    of_state = 0.0 if isinstance(mixer, ShortConvArch) else STATE_FLOPS * spec.tensor_bytes[0] / sizes[0]
    of_conv = 2 * mixer.conv_size * shapes[-1][-1]  # its state has the inputs of all but the newest token
    return MixerCost(state_bytes=spec.page_size_bytes, token_flops=of_state + of_conv)
