"""Reads the descriptions in a model directory or a GGUF file; `config.families` read their fields. No state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.config.families.choice import choose_arch
from quire.config.model_arch import ModelArch
from quire.config.overrides import overridden
from quire.errors import ModelError
from quire.formats.gguf_file import GGUFFile, is_gguf
from quire.models.gguf.registry import read_arch, read_config, read_generation
from quire.models.json_file import read_json_object

MAX_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDir:
    """What a model directory or a GGUF file says about itself.

    Attributes:
        path: the directory, or the file.
        config: the object in config.json; of a GGUF file, what its metadata says.
        generation_config: the object in generation_config.json; empty when there is none.
        gguf: the file; None of a directory.
    """

    path: Path
    config: dict[str, object]
    generation_config: dict[str, object]
    gguf: GGUFFile | None = None

    def arch(self, overrides: Mapping[str, object] | None = None, model_impl: str = "auto") -> ModelArch:
        """The model's shape.

        Args:
            overrides: fields in the place of those of config.json.
            model_impl: the setting.

        Raises:
            ModelError, UnsupportedError: as `choose_arch`.
        """
        config = overridden(self.config, overrides or {})
        return choose_arch(config, model_impl) if self.gguf is None else read_arch(self.gguf, config, model_impl)


def read_model_dir(path: str | Path) -> ModelDir:
    """The descriptions in directory `path`, or in the GGUF file `path`. Nothing in them is executed.

    Raises:
        ModelError: no such directory, no config.json, or a file that is no JSON object of sane size, or no GGUF file.
    """
    directory = Path(path)
    if is_gguf(directory):
        file = GGUFFile(directory)
        return ModelDir(path=directory, config=read_config(file), generation_config=read_generation(file), gguf=file)
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
    return "pass a directory in Hugging Face format, or download its config.json too"
