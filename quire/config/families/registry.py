"""Architecture -> its family, of Quire or of a plugin, and the `ModelArch` of whatever a config.json describes.

Called where a model directory is read, by processes without torch. A family's file is imported when it is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from quire.config.hf_fields import FieldReader
from quire.config.model_arch import ModelArch
from quire.config.model_family import ModelFamily
from quire.config.quantized_checkpoint import read_quantization
from quire.errors import ConfigError, ModelError, QuireError
from quire.plugins import MODEL, import_object, load_plugin, plugin_names

# Architecture -> (`model_type` that transformers writes beside it, "module:Class" of the family).
FAMILIES: Mapping[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("llama", "llama:Llama"),
    "DeepseekV2ForCausalLM": ("deepseek_v2", "deepseek:DeepseekV2"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", "deepseek:DeepseekV3"),
    "Glm4MoeLiteForCausalLM": ("glm4_moe_lite", "deepseek:Glm4MoeLite"),
    "MiniCPM3ForCausalLM": ("minicpm3", "minicpm3:MiniCPM3"),
    "MistralForCausalLM": ("mistral", "mistral:Mistral"),
    "Qwen2ForCausalLM": ("qwen2", "qwen:Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "qwen:Qwen3"),
    "MambaForCausalLM": ("mamba", "mamba:Mamba"),
    "FalconMambaForCausalLM": ("falcon_mamba", "mamba:FalconMamba"),
    "Mamba2ForCausalLM": ("mamba2", "mamba:Mamba2"),
    "FalconH1ForCausalLM": ("falcon_h1", "falcon_h1:FalconH1"),
    "GraniteMoeHybridForCausalLM": ("granitemoehybrid", "granite_hybrid:GraniteHybrid"),
    "JambaForCausalLM": ("jamba", "jamba:Jamba"),
    "NemotronHForCausalLM": ("nemotron_h", "nemotron_h:NemotronH"),
    "MixtralForCausalLM": ("mixtral", "mixtral:Mixtral"),
    "PhimoeForCausalLM": ("phimoe", "mixtral:PhiMoE"),
    "PhiMoEForCausalLM": ("phimoe", "mixtral:PhiMoE"),
    "Qwen2MoeForCausalLM": ("qwen2_moe", "qwen_moe:Qwen2Moe"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", "qwen_moe:Qwen3Moe"),
    "OlmoeForCausalLM": ("olmoe", "olmoe:Olmoe"),
    "GraniteMoeForCausalLM": ("granitemoe", "granite_moe:GraniteMoe"),
    "Glm4MoeForCausalLM": ("glm4_moe", "glm4_moe:Glm4Moe"),
    "GptOssForCausalLM": ("gpt_oss", "gpt_oss:GptOss"),
    "Llama4ForCausalLM": ("llama4_text", "llama4:Llama4"),
    "Llama4ForConditionalGeneration": ("llama4", "llama4:Llama4"),
    "Qwen3_5ForCausalLM": ("qwen3_5_text", "qwen_hybrid:Qwen3_5"),
    "Qwen3_5ForConditionalGeneration": ("qwen3_5", "qwen_hybrid:Qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("qwen3_5_moe_text", "qwen_hybrid:Qwen3_5Moe"),
    "Qwen3_5MoeForConditionalGeneration": ("qwen3_5_moe", "qwen_hybrid:Qwen3_5Moe"),
    "Qwen3NextForCausalLM": ("qwen3_next", "qwen_hybrid:Qwen3Next"),
    "Lfm2ForCausalLM": ("lfm2", "lfm2:Lfm2"),
    "GemmaForCausalLM": ("gemma", "gemma:Gemma"),
    "Gemma2ForCausalLM": ("gemma2", "gemma:Gemma2"),
    "Gemma3ForCausalLM": ("gemma3_text", "gemma:Gemma3"),
    "Gemma3ForConditionalGeneration": ("gemma3", "gemma:Gemma3Conditional"),
    "Gemma4ForCausalLM": ("gemma4_text", "gemma4:Gemma4"),
    "Gemma4ForConditionalGeneration": ("gemma4", "gemma4:Gemma4Conditional"),
    "Phi3ForCausalLM": ("phi3", "phi:Phi3"),
    "GraniteForCausalLM": ("granite", "granite:Granite"),
    "Olmo2ForCausalLM": ("olmo2", "olmo:Olmo2"),
    "Olmo3ForCausalLM": ("olmo3", "olmo:Olmo3"),
    "SmolLM3ForCausalLM": ("smollm3", "smollm:SmolLM3"),
    "GlmForCausalLM": ("glm", "glm:Glm"),
    "Glm4ForCausalLM": ("glm4", "glm:Glm4"),
    "CohereForCausalLM": ("cohere", "cohere:Cohere"),
    "Cohere2ForCausalLM": ("cohere2", "cohere:Cohere2"),
    "StableLmForCausalLM": ("stablelm", "stablelm:StableLM"),
    "Starcoder2ForCausalLM": ("starcoder2", "starcoder:Starcoder2"),
    "MinistralForCausalLM": ("ministral", "mistral:Ministral"),
    "Ministral3ForCausalLM": ("ministral3", "mistral:Ministral3"),
    "Mistral3ForConditionalGeneration": ("mistral3", "mistral:Mistral3"),
    "SeedOssForCausalLM": ("seed_oss", "llama:SeedOss"),
    "Ernie4_5ForCausalLM": ("ernie4_5", "glm:Ernie"),
    "Exaone4ForCausalLM": ("exaone4", "exaone:Exaone4"),
    "ArceeForCausalLM": ("arcee", "nemotron:Arcee"),
    "NemotronForCausalLM": ("nemotron", "nemotron:Nemotron"),
    "Lfm2MoeForCausalLM": ("lfm2_moe", "lfm2:Lfm2Moe"),
    "FalconForCausalLM": ("falcon", "falcon:Falcon"),
    "MptForCausalLM": ("mpt", "bloom:MPT"),
    "BloomForCausalLM": ("bloom", "bloom:Bloom"),
    "OPTForCausalLM": ("opt", "opt:OPT"),
    "GPT2LMHeadModel": ("gpt2", "gpt2:GPT2"),
    "GPTJForCausalLM": ("gptj", "gpt2:GPTJ"),
    "GPTNeoXForCausalLM": ("gpt_neox", "gpt_neox:GPTNeoX"),
}


def family_of(architecture: str) -> type[ModelFamily] | None:
    """The family of an architecture, of Quire or of the plugin that adds it; None when there is none.

    Raises:
        ConfigError: the plugin cannot be used.
    """
    if architecture in FAMILIES:
        place = f"quire.config.families.{FAMILIES[architecture][1]}"
        own: type[ModelFamily] = import_object(place, f"model {architecture!r} ({place})", MODEL.setting)
        return own
    found: type[ModelFamily] | None = load_plugin(MODEL, architecture, ModelFamily)
    if found is not None and ":" not in str(getattr(found, "model_class", "")):
        raise ConfigError(
            f"{found.__module__}:{found.__qualname__} does not name the class of its model",
            hint="write model_class = 'module:Class' in it", field=MODEL.setting,
        )  # fmt: skip
    return found


def known_architectures() -> list[str]:
    """Those of Quire and of plugins."""
    return [*FAMILIES, *plugin_names(MODEL)]


def parse_config(raw: Mapping[str, object]) -> ModelArch:
    """The shape that a `config.json` object describes.

    Fields that transformers fills with a default when they are absent get the same default here, except the sizes,
    which are required. Fields of no known meaning are ignored, as transformers does.

    Raises:
        ModelError: an unknown architecture, an unknown quantization, or a field that is missing, of the wrong type,
            out of range, or at odds with another; names the field and the fix.
        ConfigError: a plugin cannot be used.
    """
    config = FieldReader(raw)
    named = config.texts("architectures")
    # Quire's own come first: a plugin is not loaded for the sake of a second name.
    for name in sorted(named, key=lambda name: name not in FAMILIES):
        family = family_of(name)
        if family is not None:
            return _parsed(family, name, raw)
    if named:
        raise ModelError(
            f"architecture {named[0][:80]!r} is not implemented",
            hint=f"Quire has {', '.join(known_architectures())}", field="architectures",
        )  # fmt: skip
    name = _of_model_type(config)
    family = family_of(name)
    assert family is not None, "Quire's own families exist"
    return _parsed(family, name, raw)


def _of_model_type(config: FieldReader) -> str:
    model_type = config.text("model_type", [kind for kind, _ in FAMILIES.values()], "")
    for name, (kind, _) in FAMILIES.items():
        if kind == model_type:
            return name
    raise config.error("architectures", "is missing", f"add a list with one of: {', '.join(FAMILIES)}")


def _parsed(family: type[ModelFamily], name: str, raw: Mapping[str, object]) -> ModelArch:
    place = f"{family.__module__}:{family.__qualname__}.parse"
    model_type = FAMILIES[name][0] if name in FAMILIES else str(raw.get("model_type") or "")
    fields = _text_config(raw) if family.text_config else raw
    quantization = read_quantization(fields)
    try:
        arch = family.parse(fields)
    except QuireError:
        raise
    except Exception as error:  # a foreign method may raise anything
        raise ConfigError(
            f"{place} failed: {type(error).__name__}: {error}", hint="correct config.json or the plugin",
            field=MODEL.setting,
        ) from error  # fmt: skip
    if not isinstance(arch, ModelArch):
        raise ConfigError(f"{place} returned {type(arch).__name__}", hint="return a ModelArch", field=MODEL.setting)
    return dataclasses.replace(arch, architecture=name, model_type=model_type, quantization=quantization)


def _text_config(raw: Mapping[str, object]) -> Mapping[str, object]:
    """The fields of the text model, where a model of several modalities has them apart."""
    text: Any = raw.get("text_config")
    return {**raw, **text} if isinstance(text, Mapping) else raw
