"""Dense architectures of GGUF files: Llama and those like it.

Source: llama.cpp, conversion/*.py and src/models/*.cpp of the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from quire.models.gguf.family import GGUF_NAMES, GGUFFamily, head_size_of, num_layers_of
from quire.models.gguf.metadata import Metadata

FUSED: Mapping[str, str] = {"self_attn.qkv_proj": "concatenated", "mlp.gate_up_proj": "concatenated"}


class Llama(GGUFFamily):
    """Llama, Mistral, and whatever converters call llama; with experts, Mixtral."""

    architecture = "LlamaForCausalLM"
    pairs_are_neighbours = True

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Of Mixtral where there are experts."""
        return {"architectures": ["MixtralForCausalLM"]} if metadata.integer("expert_count") else {}


class Mistral3(GGUFFamily):
    """Ministral 3, whose queries grow with their position past the original length; without that key, a Mistral."""

    architecture = "LlamaForCausalLM"
    pairs_are_neighbours = True

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Of Ministral 3 where there is a temperature."""
        has_temperature = metadata.number("attention.temperature_scale")
        return {"architectures": ["Ministral3ForCausalLM"], "sliding_window": None} if has_temperature else {}

    @classmethod
    def rope(cls, metadata: Metadata) -> dict[str, object]:
        """The temperature is one of the rotary fields."""
        fields, temperature = super().rope(metadata), metadata.number("attention.temperature_scale")
        scaling = fields.pop("rope_scaling", None)
        if not temperature or not isinstance(scaling, dict) or scaling["rope_type"] != "yarn":
            return fields if scaling is None else {**fields, "rope_scaling": scaling}
        weight = metadata.number("rope.scaling.yarn_log_multiplier") or 0.0
        parameters = {
            **scaling, "rope_theta": fields.get("rope_theta", 10000.0), "llama_4_scaling_beta": temperature,
            "mscale": weight, "mscale_all_dim": weight,
        }  # fmt: skip
        return {**fields, "rope_parameters": parameters}


class Qwen2(GGUFFamily):
    """Biases on queries, keys and values."""

    architecture = "Qwen2ForCausalLM"


class Qwen3(GGUFFamily):
    """Norms on heads."""

    architecture = "Qwen3ForCausalLM"


class SmolLM3(GGUFFamily):
    """Every fourth layer has no rotary embedding; the rows of its queries and keys are reordered like the others'."""

    architecture = "SmolLM3ForCausalLM"
    pairs_are_neighbours = True


class Arcee(GGUFFamily):
    """Squared ReLUs without gates."""

    architecture = "ArceeForCausalLM"
    pairs_are_neighbours = True


class SeedOss(GGUFFamily):
    """Biases on outputs of attention or not. Norms of the feed-forward network are called after attention."""

    architecture = "SeedOssForCausalLM"
    tensor_names = ((r"\.ffn_norm\.", ".post_attention_norm."), *GGUF_NAMES)

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The second flag of biases."""
        return {"attention_out_bias": metadata.has_tensor("blk.0.attn_output.bias")}


class Ernie(GGUFFamily):
    """ERNIE 4.5: rotated pairs are neighbours in Hugging Face's checkpoints, too."""

    architecture = "Ernie4_5ForCausalLM"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """One flag for all biases."""
        return {"use_bias": metadata.has_tensor("blk.0.attn_q.bias")}


class Granite(GGUFFamily):
    """Granite 3: factors on embeddings, scores, outputs and logits."""

    architecture = "GraniteForCausalLM"
    pairs_are_neighbours = True

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The four factors."""
        if metadata.flag("rope.scaling.finetuned") is False:
            key = metadata.key("rope.scaling.finetuned")
            raise metadata.error(key, "is false", "only models with a rotary embedding run")
        return granite_factors(metadata)


def granite_factors(metadata: Metadata) -> dict[str, object]:
    """On embeddings, scores, outputs and logits."""
    return {
        "attention_multiplier": metadata.number("attention.scale") or (head_size_of(metadata) or 1) ** -0.5,
        "embedding_multiplier": metadata.number("embedding_scale"),
        "residual_multiplier": metadata.number("residual_scale"),
        "logits_scaling": metadata.number("logit_scale"),
    }


class Gemma(GGUFFamily):
    """Gains have one added."""

    architecture = "GemmaForCausalLM"
    gains_are_whole = True


class Gemma2(Gemma):
    """Windows on every other layer, soft caps."""

    architecture = "Gemma2ForCausalLM"
    window_period = 2
    default_window: ClassVar[int | None] = 4096
    # Layers of the model whose scores are scaled by the size that heads would have if they divided the hidden size.
    layers_of_divided_scale: ClassVar[int] = 46

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Scale of the scores, and caps, which are those of Gemma 2 where keys are absent."""
        return {
            "query_pre_attn_scalar": cls.query_size(metadata),
            "attn_logit_softcapping": metadata.number("attn_logit_softcapping"),
            "final_logit_softcapping": metadata.number("final_logit_softcapping"),
        }

    @classmethod
    def query_size(cls, metadata: Metadata) -> float | None:
        """Of which scores are scaled by the inverse root."""
        scale = metadata.number("attention.scale")
        if scale:
            return 1.0 / (scale * scale)
        if num_layers_of(metadata) == cls.layers_of_divided_scale:
            num_heads = metadata.one_for_all("attention.head_count", num_layers_of(metadata)) or 1
            return metadata.needed_integer("embedding_length") / num_heads
        return head_size_of(metadata)


class Gemma3(Gemma2):
    """Norms on heads, windows on five of six layers, which have a rotary embedding of their own."""

    architecture = "Gemma3ForCausalLM"
    window_period = 6
    default_window = None
    layers_of_divided_scale = 62

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Without a cap on scores."""
        return {
            "query_pre_attn_scalar": cls.query_size(metadata),
            "final_logit_softcapping": metadata.number("final_logit_softcapping"),
            "rope_local_base_freq": metadata.number("rope.freq_base_swa"),
        }


class Phi3(GGUFFamily):
    """Queries, keys and values are one tensor, gates and ups another."""

    architecture = "Phi3ForCausalLM"
    layouts: ClassVar[Mapping[str, str]] = FUSED

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """One window for all layers; 0 means none."""
        return {"sliding_window": metadata.integer("attention.sliding_window") or None}


class Olmo2(GGUFFamily):
    """Norms on outputs; with windows, OLMo 3."""

    architecture = "Olmo2ForCausalLM"
    window_period = 4

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Of OLMo 3 where there are windows."""
        return {"architectures": ["Olmo3ForCausalLM"]} if metadata.integer("attention.sliding_window") else {}


class Exaone4(GGUFFamily):
    """Norms on outputs and on heads, windows on most layers of the larger models."""

    architecture = "Exaone4ForCausalLM"
    window_period = 4


class Cohere(GGUFFamily):
    """Command R: LayerNorms without biases, attention and MLP beside each other."""

    architecture = "CohereForCausalLM"
    norm_field = "layer_norm_eps"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """The factor on logits, and whether heads have norms (Command R+)."""
        return {
            "logit_scale": metadata.number("logit_scale"),
            "use_qk_norm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        }


class Cohere2(Cohere):
    """Command R7B and A: windows and rotation on three of four layers."""

    architecture = "Cohere2ForCausalLM"
    window_period = 4


class Glm4(GGUFFamily):
    """GLM-4-0414: half-rotated heads, norms on inputs and outputs, gates and ups as one tensor."""

    architecture = "Glm4ForCausalLM"
    layouts: ClassVar[Mapping[str, str]] = {"mlp.gate_up_proj": "concatenated"}

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """Models whose rotary embedding has sections store rows in another order."""
        if metadata.has("rope.dimension_sections"):
            key = metadata.key("rope.dimension_sections")
            raise metadata.error(key, "is there", "only models of text alone run")
        return {}


class StableLM(GGUFFamily):
    """LayerNorms with biases; attention and MLP beside each other where the second norm is missing."""

    architecture = "StableLmForCausalLM"
    norm_field = "layer_norm_eps"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """What tensors say; StableLM 2 12B has norms on heads."""
        return {
            "use_qkv_bias": metadata.has_tensor("blk.0.attn_q.bias"),
            "use_parallel_residual": not metadata.has_tensor("blk.0.ffn_norm.weight"),
            "qk_layernorm": metadata.has_tensor("blk.0.attn_q_norm.weight"),
        }


class Starcoder2(GGUFFamily):
    """LayerNorms, biases, MLPs without gates."""

    architecture = "Starcoder2ForCausalLM"
    norm_field = "norm_epsilon"

    @classmethod
    def fields(cls, metadata: Metadata) -> dict[str, object]:
        """One flag for all biases."""
        return {"use_bias": metadata.has_tensor("blk.0.attn_q.bias")}


class Nemotron(GGUFFamily):
    """Squared ReLUs, LayerNorms whose gains have one added."""

    architecture = "NemotronForCausalLM"
    norm_field = "norm_eps"
    gains_are_whole = True
