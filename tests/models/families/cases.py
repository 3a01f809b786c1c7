"""The families under test: a tiny random checkpoint of each, in the classes of `transformers`, and what is refused.

An entry here runs every check of `checks` on the family and writes its row of docs/reference/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.models.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.models.dense import DENSE, GEMMA4_EXPERTS
from tests.models.hybrids import HYBRIDS
from tests.models.latents import LATENTS
from tests.models.mixtures import MIXTURES, YARN
from tests.models.state_spaces import STATE_SPACES

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One family.

    Attributes:
        title: as the page calls it.
        prefix: of its classes in `transformers`: `prefix + "Config"`, `prefix + "ForCausalLM"`.
        fields: of its config.
        common: of its config, too; what most families have.
        architectures: names in config.json that its file serves; the first is the checkpoint's.
        std: of the random weights; large enough that logits are far from uniform.
        settings: of the engine.
        reasons: check -> why this family does not pass it; the page says so.
        is_brief: `make test` checks parity alone, `make test-full` everything.
    """

    title: str
    prefix: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=lambda: COMMON)
    architectures: tuple[str, ...] = ()
    std: float = 0.1
    settings: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    is_brief: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Of the architectures."""
        return self.architectures or (f"{self.prefix}ForCausalLM",)

    def write(self, directory: Path) -> Any:
        """Write the checkpoint and its tokenizer; returns the float32 model that was written."""
        import transformers

        config = getattr(transformers, f"{self.prefix}Config")(**{**self.common, **self.fields})
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model_class = getattr(transformers, self.names[0], None) or getattr(transformers, f"{self.prefix}ForCausalLM")
        model = model_class(config).to(torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                is_gain = parameter.dim() == 1 and name.endswith(("weight", "scale"))
                parameter.normal_(1.0 if is_gain and float(parameter.mean()) > 0.5 else 0.0, self.std)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.3)
                elif name.endswith("layer_scalar"):
                    buffer.normal_(1.0, self.std)
        model.save_pretrained(directory)
        make_tokenizer(VOCAB_SIZE).save_pretrained(directory)
        return model


# Fields of every family with a state; others have meanings of their own there.
STATE_COMMON: Mapping[str, Any] = {
    name: COMMON[name]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "bos_token_id", "eos_token_id", "pad_token_id")
}
# Fields of the families that call sizes otherwise.
TOKENS: Mapping[str, Any] = {
    name: COMMON[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
}
GPT_SIZES: Mapping[str, Any] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512}
NOT_CAPTURED = "decode steps are computed call by call: some operations are still plain torch, elementwise"

STATES_ALONE = dict.fromkeys(
    ("preempted", "swapped"), "a request holds the same number of states from its start, so none has to give way"
)


def mixture(title: str, prefix: str, *, fields: Mapping[str, Any] | None = None, **given: Any) -> Case:
    """A case of `MIXTURES`, some of whose fields are others."""
    return Case(title=title, prefix=prefix, fields={**MIXTURES[prefix], **(fields or {})}, **given)


def dense(title: str, prefix: str, *more_names: str, fields: Mapping[str, Any] | None = None, **given: Any) -> Case:
    """A case of `DENSE`, some of whose fields are others; `more_names` are other architectures of its file."""
    config_prefix = f"{prefix}Text" if prefix in ("Gemma3", "Gemma4") else prefix
    return Case(
        title=title, prefix=config_prefix, fields={**DENSE[prefix], **(fields or {})},
        architectures=(f"{prefix}ForCausalLM", *more_names), **given,
    )  # fmt: skip


def state_space(title: str, name: str, **given: Any) -> Case:
    """A case of `STATE_SPACES`."""
    prefix, fields = STATE_SPACES[name]
    given_fields = {key: value for key, value in fields.items() if value is not None}
    common = {key: value for key, value in STATE_COMMON.items() if key not in fields}
    return Case(title=title, prefix=prefix, fields=given_fields, common=common, **given)


def latent(title: str, prefix: str, **given: Any) -> Case:
    """A case of `LATENTS`."""
    return Case(title=title, prefix=prefix, fields=LATENTS[prefix], **given)


def hybrid(title: str, prefix: str, **given: Any) -> Case:
    """A case of `HYBRIDS`."""
    return Case(title=title, prefix=prefix, fields=HYBRIDS[prefix], **given)


CASES: Mapping[str, Case] = {
    "llama": Case(title="Llama 1, 2, 3", prefix="Llama"),
    "mistral": Case(title="Mistral", prefix="Mistral", fields={"sliding_window": 40, "head_dim": 16}),
    "qwen2": Case(title="Qwen2, Qwen2.5", prefix="Qwen2", fields={"tie_word_embeddings": True}),
    "qwen3": Case(title="Qwen3", prefix="Qwen3", fields={"head_dim": 16, "tie_word_embeddings": True}),
    "minicpm3": latent("MiniCPM3", "MiniCPM3"),
    "deepseek_v2": latent("DeepSeek V2, V2-Lite", "DeepseekV2"),
    "deepseek_v3": latent("DeepSeek V3, R1, Kimi K2", "DeepseekV3"),
    "glm4_moe_lite": latent("GLM-4.7-Flash", "Glm4MoeLite"),
    "gemma": dense("Gemma", "Gemma"),
    "gemma2": dense("Gemma 2", "Gemma2"),
    "gemma3": dense("Gemma 3", "Gemma3", "Gemma3ForConditionalGeneration"),
    "gemma4": dense("Gemma 4, dense", "Gemma4", "Gemma4ForConditionalGeneration"),
    "gemma4_moe": dense(
        "Gemma 4, mixture (26B-A4B)", "Gemma4", "Gemma4ForConditionalGeneration", fields=GEMMA4_EXPERTS
    ),
    "phi3": dense("Phi-3, Phi-4", "Phi3"),
    "granite": dense("Granite 3", "Granite"),
    "olmo2": dense("OLMo 2", "Olmo2"),
    "olmo3": dense("OLMo 3", "Olmo3"),
    "smollm3": dense("SmolLM3", "SmolLM3"),
    "glm": dense("GLM-4", "Glm"),
    "glm4": dense("GLM-4-0414", "Glm4"),
    "cohere": dense("Command R", "Cohere"),
    "cohere_plus": dense("Command R+", "Cohere", fields={"use_qk_norm": True}, is_brief=True),
    "cohere2": dense("Command R7B, Command A", "Cohere2"),
    "stablelm": dense("StableLM 2", "StableLm"),
    "stablelm_12b": dense("StableLM 2 12B", "StableLm", fields={"qk_layernorm": True}, is_brief=True),
    "starcoder2": dense("StarCoder2", "Starcoder2"),
    "ministral": dense("Ministral", "Ministral"),
    "ministral3": dense("Ministral 3", "Ministral3", "Mistral3ForConditionalGeneration"),
    "ernie4_5": dense("ERNIE 4.5", "Ernie4_5"),
    "exaone4": dense("EXAONE 4", "Exaone4"),
    "arcee": dense("Arcee AFM", "Arcee"),
    "nemotron": dense("Nemotron, Minitron", "Nemotron"),
    "seed_oss": dense("Seed-OSS", "SeedOss"),
    "mixtral": mixture("Mixtral", "Mixtral"),
    "phimoe": mixture(
        "Phi-3.5-MoE",
        "Phimoe",
        architectures=("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    ),
    "qwen2_moe": mixture("Qwen2-MoE", "Qwen2Moe"),
    "qwen3_moe": mixture("Qwen3-MoE", "Qwen3Moe"),
    "olmoe": mixture("OLMoE", "Olmoe"),
    "granitemoe": mixture("Granite-MoE", "GraniteMoe"),
    "glm4_moe": mixture("GLM-4-MoE", "Glm4Moe"),
    "llama4": mixture("Llama 4", "Llama4Text", architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration")),
    "gpt_oss": mixture(
        "gpt-oss (bfloat16, MXFP4)",
        "GptOss",
        fields={"rope_parameters": {**YARN, "original_max_position_embeddings": 128}},
    ),
    "mamba": state_space("Mamba", "mamba", reasons=STATES_ALONE),
    "falcon_mamba": state_space("Falcon-Mamba", "falcon mamba", reasons=STATES_ALONE),
    "mamba2": state_space("Mamba 2", "mamba2", reasons=STATES_ALONE),
    "falcon_h1": state_space("Falcon-H1", "falcon h1"),
    "granite_hybrid": state_space("Granite 4 (hybrid)", "granite hybrid with experts"),
    "jamba": state_space("Jamba", "jamba with experts"),
    "nemotron_h": state_space("Nemotron-H", "nemotron h with experts"),
    "qwen3_5": hybrid(
        "Qwen3.5, Qwen3.6",
        "Qwen3_5Text",
        architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    ),
    "qwen3_5_moe": hybrid(
        "Qwen3.5, Qwen3.6 (mixtures)",
        "Qwen3_5MoeText",
        architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    ),
    "qwen3_next": hybrid("Qwen3-Next", "Qwen3Next"),
    "lfm2": hybrid("LFM2", "Lfm2"),
    "lfm2_moe": hybrid("LFM2 (mixtures)", "Lfm2Moe"),
    "falcon": Case(title="Falcon 7B", prefix="Falcon"),
    "falcon_40b": Case(
        title="Falcon 40B, 180B", prefix="Falcon", fields={"new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon_rw": Case(
        title="Falcon RW",
        prefix="Falcon",
        fields={"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        reasons={
            "parity": "transformers rounds slopes times positions to bfloat16 here: equal only while those are exact"
        },
    ),
    "mpt": Case(
        title="MPT",
        prefix="Mpt",
        common=TOKENS,
        fields={"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 512},
    ),
    "bloom": Case(title="BLOOM", prefix="Bloom", common=TOKENS, fields={"hidden_size": 60, "n_head": 6, "n_layer": 3}),
    "opt": Case(title="OPT", prefix="OPT", fields={"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "opt_350m": Case(
        title="OPT 350M",
        prefix="OPT",
        fields={"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
        is_brief=True,
    ),
    "gpt2": Case(
        title="GPT-2",
        prefix="GPT2",
        common=TOKENS,
        architectures=("GPT2LMHeadModel",),
        fields={**GPT_SIZES, "scale_attn_by_inverse_layer_idx": True},
    ),
    "gptj": Case(title="GPT-J", prefix="GPTJ", common=TOKENS, fields={**GPT_SIZES, "rotary_dim": 8}),
    "gpt_neox": Case(title="GPT-NeoX, Pythia", prefix="GPTNeoX"),
}
