"""Configurations of classes of transformers that Quire refuses to serve through them, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

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
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reformer": ({}, "does not go through the attention registry"),
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
    named = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return named if isinstance(named, str) else named[0]


def config_of(model_type: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The object of a config.json."""
    config = transformers.CONFIG_MAPPING[model_type](**fields)
    return {**config.to_dict(), "architectures": [architecture_of(model_type)]}


def write_config(directory: Path, raw: dict[str, Any]) -> None:
    """A model directory without weights."""
    (directory / "config.json").write_text(json.dumps(raw))
