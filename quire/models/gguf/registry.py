"""`general.architecture` of a GGUF file -> its family, and what a file says as the fields of config.json.

Called by `models.model_dir`, and by the registry of models for the names of tensors. Imports a family's file when it is
needed. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from quire.config.families.registry import FAMILIES, parse_config
from quire.config.model_arch import ModelArch
from quire.errors import ModelError, UnsupportedError, nearest
from quire.formats.gguf_file import GGUFFile
from quire.models.gguf.family import FIELD_KEYS, GGUFFamily
from quire.models.gguf.metadata import Metadata
from quire.plugins import MODEL, import_object

ARCHITECTURES: Mapping[str, str] = {
    "llama": "dense:Llama",
    "mistral3": "dense:Mistral3",
    "qwen2": "dense:Qwen2",
    "qwen3": "dense:Qwen3",
    "gemma": "dense:Gemma",
    "gemma2": "dense:Gemma2",
    "gemma3": "dense:Gemma3",
    "gemma4": "gemma4:Gemma4",
    "phi3": "dense:Phi3",
    "granite": "dense:Granite",
    "olmo2": "dense:Olmo2",
    "smollm3": "dense:SmolLM3",
    "command-r": "dense:Cohere",
    "cohere2": "dense:Cohere2",
    "glm4": "dense:Glm4",
    "exaone4": "dense:Exaone4",
    "stablelm": "dense:StableLM",
    "starcoder2": "dense:Starcoder2",
    "nemotron": "dense:Nemotron",
    "arcee": "dense:Arcee",
    "seed_oss": "dense:SeedOss",
    "ernie4_5": "dense:Ernie",
    "qwen2moe": "mixtures:Qwen2Moe",
    "qwen3moe": "mixtures:Qwen3Moe",
    "glm4moe": "mixtures:Glm4Moe",
    "olmoe": "mixtures:Olmoe",
    "granitemoe": "mixtures:GraniteMoe",
    "phimoe": "mixtures:PhiMoe",
    "gpt-oss": "mixtures:GptOss",
    "granitehybrid": "recurrent:GraniteHybrid",
    "deepseek2": "latent:Deepseek2",
    "lfm2": "recurrent:Lfm2",
    "lfm2moe": "recurrent:Lfm2Moe",
    "mamba": "recurrent:Mamba",
    "mamba2": "recurrent:Mamba2",
    "qwen35": "recurrent:Qwen35",
    "qwen35moe": "recurrent:Qwen35Moe",
    "qwen3next": "recurrent:Qwen3Next",
    "gpt2": "older:GPT2",
    "gptneox": "older:GPTNeoX",
    "falcon": "older:Falcon",
    "bloom": "older:Bloom",
    "mpt": "older:MPT",
}
# `general.type` of files that are no models.
OTHER_FILES = ("adapter", "mmproj", "imatrix", "vocab", "projector")
# Keys of recommended sampling -> fields of generation_config.json.
SAMPLING: Mapping[str, str] = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def gguf_family(architecture: str) -> type[GGUFFamily]:
    """The family of an architecture in `ARCHITECTURES`."""
    place = f"quire.models.gguf.{ARCHITECTURES[architecture]}"
    family: type[GGUFFamily] = import_object(place, f"GGUF architecture {architecture!r}", MODEL.setting)
    return family


def architecture_of(file: GGUFFile) -> str:
    """`general.architecture` of a model that Quire can run.

    Raises:
        ModelError: the file is no model, or one of another architecture.
    """
    kind = file.metadata.get("general.type", "model")
    name = file.metadata.get("general.architecture")
    if kind in OTHER_FILES or name in ("clip", "imatrix"):
        raise ModelError(
            f"{file.path}: general.type is {kind!r}; the file is not a language model",
            hint="give the model's own file", field="general.type",
        )  # fmt: skip
    if not isinstance(name, str):
        raise ModelError(
            f"{file.path}: general.architecture is {'missing' if name is None else 'not a string'}",
            hint="convert the model anew with a current converter", field="general.architecture",
        )  # fmt: skip
    if name not in ARCHITECTURES:
        close = nearest(name, ARCHITECTURES)
        raise ModelError(
            f"{file.path}: general.architecture {name[:80]!r} is not supported in GGUF files",
            hint=f"{f'did you mean {close!r}? ' if close else ''}supported: {', '.join(sorted(ARCHITECTURES))}; or use"
            f" the model's safetensors, of which Quire runs {len(FAMILIES)} architectures",
            field="general.architecture",
        )
    return name


def read_config(file: GGUFFile) -> dict[str, object]:
    """What the metadata says of the model, as the object in a config.json.

    Raises:
        ModelError: as `architecture_of`; or a key is missing, of a wrong type, or not supported.
    """
    architecture = architecture_of(file)
    return gguf_family(architecture).config(Metadata(file, architecture))


def read_arch(file: GGUFFile, config: Mapping[str, object], model_impl: str) -> ModelArch:
    """The model's shape, with its weights as the file stores them.

    Args:
        config: as from `read_config`, or with other fields in the place of some.
        model_impl: the setting.

    Raises:
        ModelError: a value is out of range or at odds with another; names its key.
        UnsupportedError: a class of transformers is asked for.
    """
    if model_impl == "transformers":
        raise UnsupportedError(
            "model_impl='transformers' does not read GGUF files", hint="use safetensors, or model_impl='auto'",
            field="model_impl",
        )  # fmt: skip
    architecture = architecture_of(file)
    try:
        arch = parse_config(config)
    except ModelError as error:
        key = FIELD_KEYS.get(error.field or "")
        if key is None:
            raise
        raise ModelError(
            f"{file.path}: {architecture}.{key} ({error.message.removeprefix('config.json: ')})",
            hint=error.hint, field=f"{architecture}.{key}",
        ) from error  # fmt: skip
    arch = gguf_family(architecture).as_stored(arch)
    return dataclasses.replace(arch, gguf_architecture=architecture)


def read_generation(file: GGUFFile) -> dict[str, object]:
    """Recommended sampling, as the object in a generation_config.json; empty when there is none."""
    found = {name: file.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {name: value for name, value in found.items() if value is not None}
