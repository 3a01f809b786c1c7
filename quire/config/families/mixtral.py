"""Mixtral: a Llama without biases whose MLPs are mixtures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from quire.config.families.llama import Llama
from quire.config.hf_config import read_intermediate_size, read_norm_eps
from quire.config.hf_fields import FieldReader
from quire.config.hf_moe import read_num_chosen, read_num_experts, with_experts
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import AttentionArch, HeadArch, ModelArch, MoEArch, NormArch, RouterArch
from quire.config.model_family import LLAMA_NAMES

# Experts' projections are w1 (gates), w3 (ups) and w2.
MIXTRAL_NAMES = (
    *LLAMA_NAMES,
    (r"\.moe\.router\.", ".block_sparse_moe.gate."),
    (r"\.moe\.(experts\.\d+)\.gate_proj\.", r".block_sparse_moe.\1.w1."),
    (r"\.moe\.(experts\.\d+)\.up_proj\.", r".block_sparse_moe.\1.w3."),
    (r"\.moe\.(experts\.\d+)\.down_proj\.", r".block_sparse_moe.\1.w2."),
)


class Mixtral(Llama):
    """Source: Jiang et al. 2024 (Mixtral of Experts), section 2."""

    tensor_names = MIXTRAL_NAMES

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        return with_experts(super().parse({"rms_norm_eps": 1e-5, **raw}), cls.moe(FieldReader(raw)))

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Without biases, whatever config.json says."""
        return attention

    @classmethod
    def mlp_bias(cls, config: FieldReader) -> bool:
        """None."""
        return False

    @classmethod
    def windows(cls, config: FieldReader, num_layers: int) -> Sequence[int | None]:
        """One for all layers."""
        return (config.optional_integer("sliding_window", 1, MAX_POSITIONS),) * num_layers

    @classmethod
    def moe(cls, config: FieldReader) -> MoEArch:
        """The mixture of every layer."""
        num_experts = read_num_experts(config)
        return MoEArch(
            num_experts=num_experts,
            num_chosen=read_num_chosen(config, num_experts),
            intermediate_size=read_intermediate_size(config),
            router=cls.router(config),
        )

    @classmethod
    def router(cls, config: FieldReader) -> RouterArch:
        """Softmax over all experts; the chosen ones' shares add up to one."""
        return RouterArch()


class PhiMoE(Mixtral):
    """LayerNorms, biases where config.json says so, and the sparse mixer.

    Models served beyond the original length of their longrope get its long factors, as with the code that was published
    with the weights; transformers 5 takes the short ones.

    Source: Liu et al. 2024 (GRIN: GRadient-INformed MoE), section 2.
    """

    @classmethod
    def parse(cls, raw: Mapping[str, object]) -> ModelArch:
        """As `ModelFamily.parse`."""
        config = FieldReader(raw)
        norm = NormArch(eps=read_norm_eps(config, default=1e-5), is_centered=True, has_bias=True)
        arch = super().parse(raw)
        layers = tuple(dataclasses.replace(layer, mixer_norm=norm, ffn_norm=norm) for layer in arch.layers)
        head = HeadArch(norm=norm, has_bias=config.flag("lm_head_bias", False))
        return dataclasses.replace(arch, layers=layers, head=head)

    @classmethod
    def attention(cls, config: FieldReader, attention: AttentionArch) -> AttentionArch:
        """Biases on all four projections, or none."""
        has_bias = config.flag("attention_bias", False)
        return dataclasses.replace(attention, qkv_bias=has_bias, output_bias=has_bias)

    @classmethod
    def moe(cls, config: FieldReader) -> MoEArch:
        """Two experts of a token: the sparse mixer chooses no other number."""
        moe = super().moe(config)
        if moe.num_chosen != 2:
            raise config.error("num_experts_per_tok", f"is {moe.num_chosen}", "the sparse mixer chooses 2")
        return moe

    @classmethod
    def router(cls, config: FieldReader) -> RouterArch:
        """The sparse mixer."""
        jitter = config.number("router_jitter_noise", 1e-6, 1.0, 0.01)
        return RouterArch(is_normalized=False, jitter=jitter)
