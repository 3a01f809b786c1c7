"""Dense families that are not Llamas, as `mixtures`: what the tiny checkpoint of each has in its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.models.checkpoints import COMMON, make_tokenizer

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 2.8],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0], "partial_rotary_factor": 0.75,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
# Gemma 4 26B-A4B: experts beside every MLP, and none of what only the small models have.
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 40,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0, "use_double_wide_mlp": False,
}  # fmt: skip
# Name of the class without "ForCausalLM" -> fields of its config beside those that all have.
DENSE: dict[str, dict[str, Any]] = {
    "Gemma": {"head_dim": 24, **TIED},
    "Gemma2": {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 40, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 8.0, **TIED,
    },
    "Gemma3": {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 40, "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0}, **TIED,
    },
    "Gemma4": {
        "head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 2, "num_hidden_layers": 4, "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": COMMON["vocab_size"], "use_double_wide_mlp": True,
        "final_logit_softcapping": 8.0, **TIED,
    },
    "Phi3": {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1024, "sliding_window": 70},
    "Granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    },
    "Olmo2": {},
    "Olmo3": {"sliding_window": 40, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "SmolLM3": {"no_rope_layer_interval": 2, **TIED},
    "Glm": {"head_dim": 16, "attention_bias": True},
    "Glm4": {"head_dim": 16, "attention_bias": True},
    "Cohere": {"logit_scale": 0.25, **TIED},
    "Cohere2": {"logit_scale": 0.25, "sliding_window": 40, "sliding_window_pattern": 3, **TIED},
    "StableLm": {"use_qkv_bias": True},
    "Starcoder2": {"sliding_window": 40, **TIED},
    "Ministral": {
        "head_dim": 16, "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Ministral3": {"head_dim": 16, "rope_parameters": YARN},
    "Ernie4_5": {"head_dim": 16, "use_bias": True, **TIED},
    "Exaone4": {"sliding_window": 40, "sliding_window_pattern": 3},
    "Arcee": {"mlp_bias": True},
    "Nemotron": {"hidden_act": "relu2"},
    "SeedOss": {"head_dim": 16, "attention_out_bias": True},
}  # fmt: skip


def text_config(prefix: str, **overrides: Any) -> Any:
    """The config of a family's text model."""
    name = f"{prefix}Text" if prefix in ("Gemma3", "Gemma4") else prefix
    return getattr(transformers, f"{name}Config")(**{**COMMON, **DENSE[prefix], **overrides})


def make_dense(prefix: str, directory: Path, *, std: float = 0.1, **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint and its tokenizer to `directory`, and return the float32 model that was written."""
    config = text_config(prefix, **overrides)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForCausalLM")(config)
    return write_random(model, directory, std)


def write_random(model: PreTrainedModel, directory: Path, std: float = 0.1) -> PreTrainedModel:
    """Give a model random weights and write it with a tokenizer."""
    model.set_attn_implementation("eager")
    torch.manual_seed(0)
    model = model.to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            is_gain = parameter.dim() == 1 and float(parameter.mean()) > 0.5
            parameter.normal_(1.0 if is_gain else 0.0, std)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, std)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model
