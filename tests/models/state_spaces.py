"""Tiny random checkpoints of models with selective state spaces, written by `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.models.checkpoints import COMMON, make_tokenizer

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
MAMBA2 = {"mamba_n_heads": 6, "mamba_d_state": 8}
MULTIPLIERS = {
    "ssm_multipliers": [0.5, 0.8, 1.2, 0.7, 0.9], "ssm_in_multiplier": 0.6, "ssm_out_multiplier": 1.3,
    "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.1, "key_multiplier": 0.7,
    "mlp_multipliers": [0.9, 1.2], "embedding_multiplier": 1.5, "lm_head_multiplier": 0.6,
}  # fmt: skip
FACTORS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
# Case -> (name of the classes in transformers, fields of the config).
STATE_SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 8}),
    "mamba with other biases": ("Mamba", {"state_size": 5, "use_bias": True, "use_conv_bias": False, "expand": 3}),
    "falcon mamba": ("FalconMamba", {"state_size": 8, "tie_word_embeddings": False}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2}),
    "falcon h1": ("FalconH1", {**HEADS, **MAMBA2, **MULTIPLIERS, "mamba_d_ssm": 96}),
    "falcon h1, norm first": ("FalconH1", {**HEADS, **MAMBA2, "mamba_d_ssm": 96, "mamba_rms_norm": True}),
    "falcon h1, gate first": (
        "FalconH1",
        {**HEADS, **MAMBA2, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
         "mamba_n_groups": 2},
    ),
    "granite hybrid": (
        "GraniteMoeHybrid",
        {**HEADS, **FACTORS, "mamba_n_heads": 8, "mamba_d_state": 8, "layer_types": ["mamba", "attention", "mamba"],
         "num_local_experts": 0, "shared_intermediate_size": 96},
    ),
    "granite 4 of attention alone": (
        "GraniteMoeHybrid",
        {**HEADS, **FACTORS, "mamba_n_heads": 8, "layer_types": ["attention"] * 3, "num_local_experts": 0,
         "shared_intermediate_size": 96, "position_embedding_type": "rope"},
    ),
    "granite hybrid with experts": (
        "GraniteMoeHybrid",
        {**HEADS, **FACTORS, "mamba_n_heads": 8, "mamba_d_state": 8, "layer_types": ["mamba", "attention", "mamba"],
         "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40, "shared_intermediate_size": 96,
         "position_embedding_type": "rope"},
    ),
    "jamba with experts": (
        "Jamba",
        {**HEADS, "num_experts": 6, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1,
         "mamba_d_state": 8},
    ),
    "nemotron h with experts": (
        "NemotronH",
        {**HEADS, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 8,
         "hybrid_override_pattern": "ME*-E", "num_hidden_layers": None, "n_routed_experts": 8, "n_group": 4,
         "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "routed_scaling_factor": 1.7,
         "moe_shared_expert_intermediate_size": 48, "moe_latent_size": 32},
    ),
    "jamba": (
        "Jamba",
        {**HEADS, "num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    ),
    "nemotron h": (
        "NemotronH",
        {**HEADS, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 8,
         "hybrid_override_pattern": "M*-M", "num_hidden_layers": None},
    ),
}  # fmt: skip


def make_state_space(case: str, directory: Path, **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint and its tokenizer to `directory`, and return the float32 model that was written."""
    name, fields = STATE_SPACES[case]
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id")
    given = {**{field: COMMON[field] for field in shared}, **fields, **overrides}
    config = getattr(transformers, f"{name}Config")(**{key: value for key, value in given.items() if value is not None})
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            is_gain = "norm" in parameter_name and parameter_name.endswith("weight")
            parameter.normal_(1.0 if is_gain else 0.0, 0.1)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(directory)
    make_tokenizer(config.vocab_size).save_pretrained(directory)
    return model
