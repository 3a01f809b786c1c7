"""Classes of transformers that run on Quire's engine without a family of Quire's: one of each kind, as `cases`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.models.families.cases import COMMON, Case

WINDOWS: Mapping[str, Any] = {
    "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
NOT_CAPTURED = "parts of a step are computed by the class, in plain torch"


def through(title: str, prefix: str, *, is_brief: bool = True, **given: Any) -> Case:
    """A case that transformers' class computes, whether Quire has a family by now or not."""
    return Case(
        title=title, prefix=prefix, settings={"model_impl": "transformers"}, reasons={"captured steps": NOT_CAPTURED},
        is_brief=is_brief, **given,
    )  # fmt: skip


BIGCODE = {
    **{name: COMMON[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
    "n_embd": 64, "n_inner": 96, "n_layer": 3, "n_head": 4, "n_positions": 1024, "multi_query": True,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
MIXTURE = {
    "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
THROUGH_TRANSFORMERS: Mapping[str, Case] = {
    "helium": through("Helium: interleaved rotation", "Helium", fields={"head_dim": 16}),
    "apertus": through("Apertus: a learned activation, norms on heads", "Apertus"),
    "exaone4": through("EXAONE 4: windows in some layers", "Exaone4", fields=WINDOWS, is_brief=False),
    "gpt_bigcode": through("StarCoder: one key/value head, learned positions", "GPTBigCode", common=BIGCODE),
    "granite_swa": through("Granite SWA: windows and sinks", "GraniteSWA", fields={**WINDOWS, "head_dim": 16}),
    "nanochat": through("nanochat: norms without gains, capped logits", "NanoChat"),
    "youtu": through("Youtu: latent attention, expanded", "Youtu", fields=LATENT),
    "dots1": through("dots.llm1: a mixture of experts", "Dots1", fields=MIXTURE, is_brief=False),
}
