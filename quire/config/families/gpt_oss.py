"""gpt-oss: attention with sinks, windows in every other layer, and mixtures with biases and clamped gates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from quire.config.families.llama import Llama
from quire.config.hf_config import Heads, read_heads, read_intermediate_size
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import read_num_chosen, read_num_experts, with_experts
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import AttentionArch, ModelArch, MoEArch, RouterArch
from quire.config.model_family import LLAMA_NAMES
from quire.config.quantized_checkpoint import read_quantization

DEFAULT_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


class GptOss(Llama):
    """Source: OpenAI 2025 (gpt-oss-120b & gpt-oss-20b Model Card), section 2."""

    tensor_names = (*LLAMA_NAMES, (r"\.moe\.", ".mlp."))
    layouts: ClassVar[Mapping[str, str]] = {"moe.experts": "interleaved, transposed"}

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`; experts may be in MXFP4, as OpenAI publishes them."""
        quantization = read_quantization(raw)
        is_mxfp4 = quantization is not None and quantization.method == "mxfp4"
        config = FieldReader(raw)
        num_experts = read_num_experts(config)
        moe = MoEArch(
            num_experts=num_experts,
            num_chosen=read_num_chosen(config, num_experts),
            intermediate_size=read_intermediate_size(config),
            router=RouterArch(scoring="softmax_of_chosen", is_normalized=False, has_bias=True),
            has_bias=True,
            clamp=config.number("swiglu_limit", 1e-6, 1e6, 7.0),
            swiglu_alpha=config.number("swiglu_alpha", 1e-6, 1e6, 1.702),
            is_mxfp4=is_mxfp4,
        )
        has_rope = config.has("rope_parameters") or config.has("rope_scaling")
        defaults = {"rms_norm_eps": 1e-5} if has_rope else {"rms_norm_eps": 1e-5, "rope_scaling": DEFAULT_ROPE}
        return with_experts(super().parse({**raw, **{k: v for k, v in defaults.items() if not config.has(k)}}), moe)

    @classmethod
    def heads(cls, config: FieldReader) -> Heads:
        """Heads have 64 elements unless config.json says otherwise."""
        return read_heads(config, default_head_size=64)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """With sinks, and biases unless config.json says otherwise."""
        has_bias = config.flag("attention_bias", True)
        return dataclasses.replace(attention, qkv_bias=has_bias, output_bias=has_bias, has_sinks=True)

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """Experts have their own."""
        return False

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """Every other layer, from the first on, unless `layer_types` says which."""
        default = None if "sliding_window" in config.raw else 128
        window = config.optional_integer("sliding_window", 1, MAX_POSITIONS) or default
        layer_types = config.texts("layer_types") or ("sliding_attention", "full_attention") * num_layers
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types[:num_layers])
