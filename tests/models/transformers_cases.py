"""Tiny checkpoints of classes of transformers that Quire has no family for, and configurations that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
WINDOWS = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SERVED: dict[str, dict[str, Any]] = {
    "arcee": SIZES,
    "ernie4_5": {**SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "exaone4": {**SIZES, **WINDOWS},
    "gpt_bigcode": {
        "vocab_size": 320, "n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4, "n_positions": 1024,
        "multi_query": True, "bos_token_id": 1, "eos_token_id": 2,
    },
    "granite_swa": {**SIZES, **WINDOWS, "head_dim": 16},
    "nanochat": SIZES,
    "phi": SIZES,
    "dots1": {
        **SIZES, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "codegen": ({}, "does not go through the attention registry"),
    "mamba": ({}, "recurrent layers"),
    "recurrent_gemma": ({}, "recurrent layers"),
    "bart": ({}, "encoder with a decoder"),
    "bert": ({}, "neither causal nor sliding windows"),
    "diffllama": (SIZES, "calls its attention 2 times"),
    "doge": ({}, "attention masks of its own"),
    "glm_moe_dsa": ({}, "called with indices"),
    "git": ({}, "made of several models"),
}


def architecture_of(model_type: str) -> str:
    """The class for text generation of a model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return named if isinstance(named, str) else named[0]


def config_of(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The object of a config.json."""
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    return {**config.to_dict(), "architectures": [architecture_of(model_type)]}


def make_checkpoint(model_type: str, directory: Path) -> PreTrainedModel:
    """Write a random checkpoint of a class that is served, and return the model, in float32."""
    config = transformers.CONFIG_MAPPING[model_type](**SERVED[model_type])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_gain = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.1)
    model.save_pretrained(directory)
    return model


def write_config(directory: Path, raw: dict[str, Any]) -> None:
    """A model directory without weights."""
    (directory / "config.json").write_text(json.dumps(raw))
