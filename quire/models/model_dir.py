"""Reads the descriptions in a model directory; `config.families` read their fields. No state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.errors import ModelError
from quire.models.hub import NO_GGUF
from quire.models.json_file import read_json_object

MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDir:
    """What a model directory says about itself.

    Attributes:
        config: the object in config.json.
        generation_config: the object in generation_config.json; empty when there is none.
    """

    path: Path
    config: dict[str, object]
    generation_config: dict[str, object]


def read_model_dir(path: str | Path) -> ModelDir:
    """The descriptions in directory `path`. Nothing in it is executed.

    Raises:
        ModelError: no such directory, no config.json, or a file that is no JSON object of sane size.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ModelError(f"{directory} is not a directory", hint="pass the directory that contains config.json")
    config_path, generation_path = directory / "config.json", directory / "generation_config.json"
    if not config_path.is_file():
        raise ModelError(f"{directory} has no config.json", hint=_missing_config_hint(directory), field="config.json")
    return ModelDir(
        path=directory,
        config=read_json_object(config_path, MAX_CONFIG_BYTES),
        generation_config=read_json_object(generation_path, MAX_CONFIG_BYTES) if generation_path.exists() else {},
    )


def _missing_config_hint(directory: Path) -> str:
    if (directory / "adapter_config.json").exists():
        return "this is a LoRA adapter; pass the directory of its base model"
    if (directory / "params.json").exists():
        return "these are Meta's or Mistral's original files; download the Hugging Face ones"
    if next(directory.glob("*.gguf"), None) is not None:
        return f"these are GGUF files, which Quire does not support; {NO_GGUF}"
    return "pass a directory in Hugging Face format, or download its config.json too"
