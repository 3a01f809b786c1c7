"""Older architectures of GGUF files: LayerNorms, queries, keys and values as one tensor, MLPs without gates.

Converters bring that tensor's rows into the order queries, keys, values, and matrices into [output_size, input_size].
Source: llama.cpp, conversion/*.py and src/models/*.cpp of the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.config.model_arch import ModelArch
from quire.config.model_family import TensorNames
from quire.models.gguf.family import GGUF_NAMES, GGUFFamily
from quire.models.gguf.metadata import Metadata


class Older(GGUFFamily):
    """What they share."""

    norm_field = "layer_norm_epsilon"
    layouts: ClassVar[Mapping[str, str]] = {"self_attn.qkv_proj": "concatenated"}


class GPT2(Older):
    """Positions from a table."""

    architecture = "GPT2LMHeadModel"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes under GPT-2's names."""
        return {
            "n_embd": metadata.integer("embedding_length"),
            "n_layer": metadata.integer("block_count"),
            "n_head": metadata.integer("attention.head_count"),
            "n_positions": metadata.integer("context_length"),
            "n_inner": metadata.integer("feed_forward_length"),
        }


class GPTNeoX(Older):
    """GPT-NeoX and Pythia."""

    architecture = "GPTNeoXForCausalLM"
    norm_field = "layer_norm_eps"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """What tensors and keys say."""
        return {
            "use_parallel_residual": metadata.flag("use_parallel_residual"),
            "attention_bias": metadata.has_tensor("blk.0.attn_qkv.bias"),
        }

    @classmethod
    def rope(cls, metadata: Metadata) -> dict[str, object]:
        """The share of rotated elements under its own name."""
        fields = super().rope(metadata)
        return {**fields, "rotary_pct": fields.pop("partial_rotary_factor", 1.0)}


class Falcon(Older):
    """Falcon 7B and 40B, 180B: attention and MLP beside each other, behind one norm or two."""

    architecture = "FalconForCausalLM"

    @classmethod
    def names(cls, arch: ModelArch) -> TensorNames:
        """Of two norms, the MLP's is the first."""
        if arch.layers[0].ffn_norm is None:
            return GGUF_NAMES
        return ((r"\.mixer_norm\.", ".attn_norm_2."), (r"\.ffn_norm\.", ".attn_norm."), *GGUF_NAMES)

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The new decoder architecture is the one with two norms, or several key/value heads."""
        has_two = metadata.has_tensor("blk.0.attn_norm_2.weight")
        num_kv_heads = metadata.integer("attention.head_count_kv") or 1
        is_new = has_two or num_kv_heads > 1
        return {
            "new_decoder_architecture": is_new,
            "num_ln_in_parallel_attn": 2 if has_two else 1,
            "num_kv_heads": num_kv_heads,
            "multi_query": num_kv_heads == 1,
            "bias": metadata.has_tensor("blk.0.attn_qkv.bias"),
            "ffn_hidden_size": metadata.integer("feed_forward_length"),
        }


class Bloom(Older):
    """ALiBi, and a norm on embeddings."""

    architecture = "BloomForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes under BLOOM's names."""
        return {
            "n_layer": metadata.integer("block_count"),
            "n_head": metadata.integer("attention.head_count"),
            "seq_length": metadata.integer("context_length"),
        }


class MPT(Older):
    """ALiBi, LayerNorms without biases."""

    architecture = "MptForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes under MPT's names."""
        for name in ("position_embd.weight", "blk.0.attn_qkv.bias", "blk.0.attn_q_norm.weight", "blk.0.ffn.act.scales"):
            if metadata.has_tensor(name):
                raise metadata.error(name, "is there", "only MPTs without it run")
        hidden_size = metadata.needed_integer("embedding_length")
        return {
            "d_model": hidden_size,
            "n_layers": metadata.integer("block_count"),
            "n_heads": metadata.integer("attention.head_count"),
            "max_seq_len": metadata.integer("context_length"),
            "expansion_ratio": metadata.needed_integer("feed_forward_length") / hidden_size,
            "attn_config": {
                "alibi": True,
                "alibi_bias_max": metadata.number("attention.max_alibi_bias"),
                "clip_qkv": metadata.number("attention.clamp_kqv"),
            },
        }
