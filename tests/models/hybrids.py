"""Hybrids of attention with Gated DeltaNet or short convolutions, as `mixtures`: fields of each tiny checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.models.checkpoints import COMMON, make_tokenizer

DELTA_NET = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 48}
CONV = {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True}
# Name of the config's class without "Config" -> fields of its config beside those that all have.
HYBRIDS: dict[str, dict[str, Any]] = {
    "Qwen3_5Text": {**DELTA_NET, "tie_word_embeddings": True},
    "Qwen3_5MoeText": {**DELTA_NET, **SHARED},
    "Qwen3Next": {**DELTA_NET, **SHARED, "mlp_only_layers": [1]},
    "Lfm2": {**CONV, "block_multiple_of": 16, "conv_bias": True},
    "Lfm2Moe": {**CONV, **EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5},
}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16,
}  # fmt: skip


def make_seeing_hybrid(family: str, directory: Path) -> PreTrainedModel:
    """Write a checkpoint of a family that also sees, and return the float32 model that was written.

    Args:
        family: of `HYBRIDS`, whose fields are those of its text part.
    """
    prefix = family.removesuffix("Text")
    text = {**COMMON, **HYBRIDS[family]}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text, vision_config=VISION, tie_word_embeddings=text["tie_word_embeddings"]
    )
    config.text_config._attn_implementation = "eager"
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{prefix}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0, 0.1)
    model.save_pretrained(directory)
    make_tokenizer(COMMON["vocab_size"]).save_pretrained(directory)
    return model
