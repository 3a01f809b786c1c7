"""Reads the file of settings that `--config` names: JSON or YAML, every name once. Called by `args`; no state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.entrypoints.flag_forms import merge_dotted
from quire.errors import ConfigError

MAX_CONFIG_FILE_BYTES = 1 << 20


def read_config_file(path: str) -> dict[str, Any]:
    """Settings from a JSON or YAML file: one object of name -> value; names may be written with dashes.

    Raises:
        ConfigError: the file is missing, too large, malformed, or not one object.
    """
    file = Path(path)
    if file.suffix.lower() == ".toml":
        raise ConfigError(
            f"config file {path}: .toml is not supported", hint="write it as YAML or JSON", field="config"
        )
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_CONFIG_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"config file {path} cannot be read: {error.strerror}", hint="check the path", field="config"
        ) from None
    if len(text) > MAX_CONFIG_FILE_BYTES:
        raise ConfigError(f"config file {path} is larger than 1 MiB", hint="keep settings only", field="config")
    if file.suffix.lower() in (".yaml", ".yml"):
        # Late: only who writes YAML needs the library.
        from quire.utils.yaml_config import parse_yaml

        return merge_dotted(_refuse_duplicates(parse_yaml(path, text)))
    try:
        values = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"config file {path} is not JSON: {error}", hint='write {"setting": value, ...}', field="config"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} is not an object", hint='write {"setting": value, ...}', field="config")
    return merge_dotted(values)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        name = key.replace("-", "_")
        if name in values:
            raise ConfigError(f"the config file gives {name!r} twice", hint="give it once", field=name)
        values[name] = value
    return values
