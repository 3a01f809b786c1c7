"""Values that replace those of a model's own files: `hf_overrides` and `override_generation_config`.

Read by `config.model` when a configuration is made, and by the front-end's factory. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROPE_NAMES = ("rope_parameters", "rope_scaling")  # transformers 5 and 4
HF_FIELDS = (
    "architectures", "bos_token_id", "dtype", "eos_token_id", "layer_types", "max_position_embeddings",
    "max_window_layers", "original_max_position_embeddings", "partial_rotary_factor", "rms_norm_eps", *ROPE_NAMES,
    "rope_theta", "sliding_window", "tie_word_embeddings", "torch_dtype", "use_sliding_window", "max_model_len",
)  # fmt: skip
NO_HF_FIELDS = {"max_model_len": "no model's file has this field; give max_model_len as a setting"}
"""Taken because programs for vLLM write them, where they change nothing either; name -> the warning."""
GENERATION_FIELDS = (
    "eos_token_id", "max_new_tokens", "min_p", "repetition_penalty", "temperature", "top_k", "top_p",
)  # fmt: skip
SAMPLING_FIELDS = tuple(name for name in GENERATION_FIELDS if name != "eos_token_id")


def overridden(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a config.json with `overrides` in it; objects are merged, under either name of the rotary one."""
    result = dict(config)
    for name, value in overrides.items():
        if name in ROPE_NAMES:
            name = next((one for one in ROPE_NAMES if config.get(one) is not None), name)
        old = result.get(name)
        result[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def generation_values(config: Mapping[str, Any], overrides: Mapping[str, Any], *, is_neutral: bool) -> dict[str, Any]:
    """The object of a generation_config.json with `overrides` in it; of a neutral one, without its sampling."""
    kept = {name: value for name, value in config.items() if not (is_neutral and name in SAMPLING_FIELDS)}
    return {**kept, **overrides}
