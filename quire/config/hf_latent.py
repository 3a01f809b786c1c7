"""Latent attention in the `config.json` files of the families that have it. Called by the families. Pure."""

from __future__ import annotations

import dataclasses
import math

from quire.config.hf_config import MAX_HEAD_SIZE, MAX_HEADS, MAX_HIDDEN_SIZE, read_max_positions
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import RopeConfig, parse_rope
from quire.config.model_arch import LatentAttentionArch, NormArch

MAX_LATENT_SIZE = 2048
LATENT_EPS = 1e-6
"""Of the norms of latents and compressed queries, whatever `rms_norm_eps` is."""


def read_latent_attention(
    config: FieldReader, *, is_interleaved: bool, value_size: int | None = None
) -> tuple[LatentAttentionArch, int]:
    """The attention of all layers, and the longest sequence that its rotary embedding serves.

    Args:
        value_size: without `v_head_dim`; None = the field is required.

    Raises:
        ModelError: as `FieldReader`, or odd sizes.
    """
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    if num_kv_heads != num_heads:
        raise config.error(
            "num_key_value_heads", f"is {num_kv_heads}", f"all {num_heads} heads share a latent; remove the field"
        )
    nope_size, rope_size = (config.integer(name, 2, MAX_HEAD_SIZE) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    latent_size = config.integer("kv_lora_rank", 2, MAX_LATENT_SIZE)
    for name, size in (("qk_rope_head_dim", rope_size), ("kv_lora_rank", latent_size)):
        if size % 2:
            raise config.error(name, f"is {size}", "it must be an even number")
    # Field, which transformers sets whatever the file says, that would make parts of heads rotate.
    rope_fields = FieldReader({**config.raw, "partial_rotary_factor": 1.0}, config.source)
    rope, longest = parse_rope(rope_fields, rope_size, read_max_positions(config))
    attention = LatentAttentionArch(
        num_heads=num_heads,
        query_rank=config.optional_integer("q_lora_rank", 1, MAX_HIDDEN_SIZE),
        latent_size=latent_size,
        nope_size=nope_size,
        rope_size=rope_size,
        value_size=config.integer("v_head_dim", 1, MAX_HEAD_SIZE, value_size),
        scale=(nope_size + rope_size) ** -0.5 * score_scale(rope),
        rope=dataclasses.replace(rope, is_interleaved=is_interleaved),
        norm=NormArch(eps=LATENT_EPS),
        has_bias=config.flag("attention_bias", False),
    )
    return attention, longest


def score_scale(rope: RopeConfig) -> float:
    """Factor on scores of YaRN and other scalings in this family: the square of (0.1 m ln(factor) + 1).

    Beside the factor on cosine and sine: that one is the ratio of `mscale` to `mscale_all_dim`, which is 1 where they
    are equal, and touches the rotated elements alone.
    Source: Peng et al. 2023 (YaRN), section 3.4, with m = `mscale_all_dim`.
    """
    parameters = dict(rope.parameters)
    factor, weight = parameters.get("factor", 1.0), parameters.get("mscale_all_dim", 0.0)
    return (0.1 * weight * math.log(factor) + 1.0) ** 2 if weight and factor > 1.0 else 1.0
