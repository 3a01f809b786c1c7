"""Tiny random mixtures of experts, as `checkpoints`: config class, model class and fields of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.models.checkpoints import COMMON, make_tokenizer

YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
# Name of the config class without "Config" -> fields of its config beside those that all have.
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80, "mlp_only_layers": [1],
    },
    "Qwen3Moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True,
        "head_dim": 16, "decoder_sparse_step": 2,
    },
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "Phimoe": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": True, "lm_head_bias": True,
        "router_jitter_noise": 0.2,
    },
    "GraniteMoe": {
        "num_local_experts": 6, "num_experts_per_tok": 3, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    },
    "Glm4Moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True, "head_dim": 16,
    },
    "Llama4Text": {
        "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size_mlp": 80, "moe_layers": [0, 2],
        "head_dim": 16, "no_rope_layer_interval": 3, "attention_chunk_size": 32, "floor_scale": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "GptOss": {
        "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 20,
        "rope_parameters": YARN,
    },
}  # fmt: skip


def make_mixture(family: str, directory: Path, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Write a checkpoint and its tokenizer to `directory`, and return the float32 model that was written."""
    fields = {**COMMON, **MIXTURES[family], **overrides}
    config = getattr(transformers, f"{family}Config")(**fields, attn_implementation="eager")
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.generation_config.eos_token_id = config.eos_token_id
    model.save_pretrained(directory)
    make_tokenizer(config.vocab_size).save_pretrained(directory)
    return model
