"""Gemma 4 in GGUF files: layers without a window have heads of another size, some have an input of their own.

Source: llama.cpp, conversion/gemma.py (Gemma4Model) and src/models/gemma4.cpp.
"""

from __future__ import annotations

from quire.models.gguf.family import GGUF_NAMES, GGUFFamily, num_layers_of
from quire.models.gguf.metadata import Metadata
from quire.models.gguf.mixtures import expert_size
from quire.models.gguf.rope import FREQUENCIES

# What the frequencies of pairs that are not rotated are divided by is far above this.
MOST_ROTATED = 1e6


class Gemma4(GGUFFamily):
    """Dense, and the mixture beside an MLP."""

    architecture = "Gemma4ForCausalLM"
    window_period = 6
    varied = ("feed_forward_length", "attention.head_count_kv")
    tensor_names = (
        (r"^model\.embed_tokens_per_layer\.", "per_layer_token_embd."),
        (r"^model\.per_layer_model_projection\.", "per_layer_model_proj."),
        (r"^model\.per_layer_projection_norm\.", "per_layer_proj_norm."),
        (r"\.per_layer_input_gate\.", ".inp_gate."),
        (r"\.per_layer_projection\.", ".proj."),
        (r"\.post_per_layer_input_norm\.", ".post_norm."),
        (r"\.layer_scalar$", ".layer_output_scale.weight"),
        (r"\.mlp\.output_norm\.", ".post_ffw_norm_1."),
        (r"\.moe\.input_norm\.", ".pre_ffw_norm_2."),
        (r"\.moe\.output_norm\.", ".post_ffw_norm_2."),
        (r"\.moe\.router\.norm\.weight$", ".ffn_gate_inp.scale"),
        (r"\.moe\.router\.expert_scales$", ".ffn_down_exps.scale"),
        *GGUF_NAMES,
    )
    # Of layers that read another one's cache.
    ignored_tensors = (r"\.attn_[kv](_norm)?\.",)

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """What differs between layers with a window and without, and what tensors say."""
        num_layers = num_layers_of(metadata)
        table = metadata.tensor("per_layer_token_embd.weight")
        sizes = metadata.per_layer("feed_forward_length", num_layers) or []
        return {
            "head_dim": metadata.integer("attention.key_length_swa"),
            "global_head_dim": metadata.integer("attention.key_length"),
            **cls.heads(metadata, num_layers),
            "num_kv_shared_layers": metadata.integer("attention.shared_kv_layers") or 0,
            "use_double_wide_mlp": len(set(sizes)) > 1,
            "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input") or 0,
            "vocab_size_per_layer_input": None if table is None else table.shape[0],
            "final_logit_softcapping": metadata.number("final_logit_softcapping"),
            **cls.experts(metadata),
        }

    @classmethod
    def heads(cls, metadata: Metadata, num_layers: int) -> dict[str, object]:
        """Key/value heads of both kinds of layers; keys are values where a layer without a window has no values."""
        types = cls.windows(metadata).get("layer_types")
        counts = metadata.per_layer("attention.head_count_kv", num_layers)
        if not isinstance(types, list) or counts is None:
            return {}
        found: dict[str, object] = {}
        for layer, kind in enumerate(types):
            if kind == "sliding_attention":
                found.setdefault("num_key_value_heads", counts[layer])
            else:
                found.setdefault("num_global_key_value_heads", counts[layer])
                found.setdefault("attention_k_eq_v", not metadata.has_tensor(f"blk.{layer}.attn_v.weight"))
        return found

    @classmethod
    def experts(cls, metadata: Metadata) -> dict[str, object]:
        """Of the mixture; empty without one."""
        if not metadata.integer("expert_count"):
            return {}
        return {
            "enable_moe_block": True, "num_experts": metadata.integer("expert_count"),
            "top_k_experts": metadata.integer("expert_used_count"), "moe_intermediate_size": expert_size(metadata),
        }  # fmt: skip

    @classmethod
    def rope(cls, metadata: Metadata) -> dict[str, object]:
        """Without a window, only the first pairs are rotated: those whose frequencies are not divided away."""
        full: dict[str, object] = {"rope_type": "proportional", "rope_theta": metadata.number("rope.freq_base") or 1e6}
        factors = metadata.floats(FREQUENCIES)
        if factors:
            num_rotated = sum(factor < MOST_ROTATED for factor in factors)
            # A bit more than the share, which is multiplied by the number of pairs and rounded down.
            full["partial_rotary_factor"] = min(1.0, (num_rotated + 0.25) / len(factors))
        theta = metadata.number("rope.freq_base_swa") or 10000.0
        return {"rope_parameters": {
            "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        }}  # fmt: skip
