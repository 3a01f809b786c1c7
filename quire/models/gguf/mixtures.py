"""Mixtures of experts in GGUF files.

Source: llama.cpp, conversion/*.py and src/models/*.cpp of the same names.
"""

from __future__ import annotations

from quire.models.gguf.dense import Granite
from quire.models.gguf.family import GGUF_NAMES, GGUFFamily, num_layers_of
from quire.models.gguf.metadata import Metadata


def dense_layers(metadata: Metadata) -> list[int]:
    """Numbers of the layers without experts."""
    layers = range(num_layers_of(metadata))
    return [layer for layer in layers if not metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight")]


def num_dense_layers(metadata: Metadata) -> int:
    """How many of the first layers have no experts."""
    dense = dense_layers(metadata)
    return next((layer for layer in range(len(dense)) if dense[layer] != layer), len(dense))


class Qwen2Moe(GGUFFamily):
    """A shared expert with a gate; weights are not normalized."""

    architecture = "Qwen2MoeForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Sizes of the shared expert and of the others, of tensors where keys are absent."""
        return {
            "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length")
            or num_rows(metadata, "ffn_up_shexp", dense_layers(metadata)),
            "moe_intermediate_size": expert_size(metadata),
            "mlp_only_layers": dense_layers(metadata),
            "qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
        }


class Qwen3Moe(GGUFFamily):
    """Norms on heads; weights are normalized unless a key says otherwise."""

    architecture = "Qwen3MoeForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Which layers have experts, tensors say."""
        is_normalized = metadata.flag("expert_weights_norm")
        return {
            "norm_topk_prob": True if is_normalized is None else is_normalized,
            "moe_intermediate_size": expert_size(metadata),
            "mlp_only_layers": dense_layers(metadata),
        }


class Glm4Moe(GGUFFamily):
    """GLM-4.5 and 4.6: DeepSeek V3's mixtures behind dense layers; the norm before them is called after attention."""

    architecture = "Glm4MoeForCausalLM"
    tensor_names = ((r"\.ffn_norm\.", ".post_attention_norm."), *GGUF_NAMES)

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The router's, and whether heads have norms."""
        return {
            "n_routed_experts": metadata.integer("expert_count"),
            "n_shared_experts": metadata.integer("expert_shared_count"),
            "first_k_dense_replace": num_dense_layers(metadata),
            "routed_scaling_factor": metadata.number("expert_weights_scale"),
            "n_group": metadata.integer("expert_group_count"),
            "topk_group": metadata.integer("expert_group_used_count"),
            "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        }


class Olmoe(GGUFFamily):
    """Norms over all query heads and all key heads."""

    architecture = "OlmoeForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The experts' size is that of the feed-forward network."""
        return {"clip_qkv": metadata.number("attention.clamp_kqv"), "num_experts": metadata.integer("expert_count")}


class GraniteMoe(Granite):
    """Granite 3 with mixtures."""

    architecture = "GraniteMoeForCausalLM"
    # The MLP that every token passes through is a part of its own.
    tensor_names = ((r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1_shexp."), *GGUF_NAMES)

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """With a shared expert, of Granite 4 without states."""
        shared = metadata.integer("expert_shared_feed_forward_length")
        if not shared:
            return super().fields(metadata)
        kinds = ["attention"] * num_layers_of(metadata)
        return {
            **super().fields(metadata), "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": kinds,
            "shared_intermediate_size": shared, "position_embedding_type": "rope",
        }  # fmt: skip


class PhiMoe(GGUFFamily):
    """Phi-3.5-MoE: LayerNorms, biases, the sparse mixer."""

    architecture = "PhiMoEForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The window is one for all layers; biases, tensors say."""
        return {
            "lm_head_bias": metadata.has_tensor("output.bias"),
            "sliding_window": metadata.integer("attention.sliding_window") or None,
        }


class GptOss(GGUFFamily):
    """Sinks, windows on every other layer, mixtures with biases; the norm before them is called after attention."""

    architecture = "GptOssForCausalLM"
    tensor_names = ((r"\.ffn_norm\.", ".post_attention_norm."), *GGUF_NAMES)
    window_period = 2

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The size of the experts under gpt-oss's name."""
        return {"intermediate_size": expert_size(metadata)}

    @classmethod
    def rope(cls, metadata: Metadata) -> dict[str, object]:
        """The ends of YaRN's ramp are not rounded, which no key says."""
        fields = super().rope(metadata)
        scaling = fields.get("rope_scaling")
        if isinstance(scaling, dict) and scaling["rope_type"] == "yarn":
            fields["rope_scaling"] = {**scaling, "truncate": False}
        return fields


def expert_size(metadata: Metadata) -> int | None:
    """Elements within an expert, of tensors where the key is absent."""
    size = metadata.integer("expert_feed_forward_length")
    return size or num_rows(metadata, "ffn_up_exps", dense_layers(metadata))


def num_rows(metadata: Metadata, name: str, without: list[int]) -> int | None:
    """Rows of the matrix of the first layer that has it."""
    for layer in range(num_layers_of(metadata)):
        tensor = None if layer in without else metadata.tensor(f"blk.{layer}.{name}.weight")
        if tensor is not None:
            return tensor.shape[-2] if len(tensor.shape) > 1 else None
    return None
