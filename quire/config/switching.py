"""The file of models that `quire serve --models` and `quire run --models` read: a typed boundary, errors by field.

    memory_budget: 12GiB
    models:
      chat:
        model: Qwen/Qwen2.5-0.5B-Instruct
        pinned: true
        max_model_len: 8192
      coder:
        model: ./coder-Q4_K_M.gguf
        served_model_name: [coder-small]

Read by the server's command; no state.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.base import check_settings, info_of, setting, settings_of
from quire.config.build import SECTIONS, SERVER_SECTIONS, Setting, build_config, settings_by_name
from quire.config.engine import QuireConfig
from quire.config.server import ApiConfig
from quire.errors import ConfigError, QuireError, UnsupportedError, unknown_name
from quire.utils.checks import check_bool, check_text, shown, wrong_type
from quire.utils.sizes import parse_size

FIELD = "models"
MAX_FILE_BYTES = 1 << 20
MAX_MODELS = 256
NAME = re.compile(r"[\w.:/@+-]{1,256}", re.ASCII)
OWN_SERVER_SETTINGS = (
    "tool_call_parser", "tool_call_format", "hold_tool_calls", "reasoning_parser", "default_chat_template_kwargs",
    "chat_template_content_format", "response_role", "shared_prefixes",
)  # fmt: skip
"""Settings of the server that each model may have for itself."""
ONE_CORE_EACH = ("flight_recorder", "kv_events_config")
"""Settings that name a place which two engine cores cannot share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchingConfig:
    """How the models of one server share its memory."""

    memory_budget: int | None = setting(
        None, "Bytes that the models in memory may take together: weights, KV cache and workspace. Default: 80% of the "
        "memory that is free when the server starts.", minimum=1 << 20, is_size=True,
    )  # fmt: skip
    idle_unload_s: float | None = setting(
        None, "Seconds without a request after which a model that is not pinned is unloaded; default: models stay "
        "until another one needs their memory.", minimum=0.1, maximum=1e9,
    )  # fmt: skip
    busy_turn_s: float = setting(
        10.0, "Seconds for which a model with running requests keeps its memory after it was loaded while another "
        "waits for that memory. Then new requests for it wait, its running ones end, and it is unloaded.",
        minimum=0.0, maximum=1e9,
    )  # fmt: skip
    spare_process: bool = setting(
        True,
        "Keep one process with the libraries of an engine core imported, so that the next model loads sooner "
        "(about 300 MB outside of memory_budget).",
    )

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """One model of the file.

    Attributes:
        names: under which it is served; the first is its key in the file, and is reported.
        config: of its engine, not resolved.
        api: how its answers are read, where that differs from the other models': settings of `ApiConfig`.
        is_pinned: loaded at the start, and never unloaded for another model.
    """

    names: tuple[str, ...]
    config: QuireConfig
    api: Mapping[str, Any]
    is_pinned: bool

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def api_config(self, common: ApiConfig) -> ApiConfig:
        """The server's `common` settings with those of this model in their place."""
        return dataclasses.replace(common, **self.api)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsFile:
    """What the file says."""

    switching: SwitchingConfig
    models: tuple[ModelEntry, ...]


def read_models_file(path: str | Path, defaults: Mapping[str, Any] | None = None) -> ModelsFile:
    """Read file `path`, YAML or (by its suffix .json) JSON.

    Args:
        defaults: engine settings by name, for every model that does not set them itself.

    Raises:
        ConfigError, UnsupportedError: the file, the model and the field are named.
    """
    values = _read(str(path))
    named = values.pop("models", None)
    where = f"models file {path}"
    switching = _switching(where, values)
    if not isinstance(named, dict) or not named:
        raise ConfigError(
            f"{where}: models must be a mapping of names to settings", hint="write models: {NAME: {model: PATH}}",
            field=FIELD,
        )  # fmt: skip
    if len(named) > MAX_MODELS:
        raise ConfigError(f"{where}: more than {MAX_MODELS} models", hint="split the file", field=FIELD)
    models = tuple(_entry(where, name, entry, defaults or {}) for name, entry in named.items())
    _check_names(where, models)
    return ModelsFile(switching=switching, models=models)


def _read(path: str) -> dict[str, Any]:
    """The top-level entries of a file, each once."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"models file {path} cannot be read: {error.strerror}", hint="check the path", field=FIELD
        ) from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"models file {path} is larger than 1 MiB", hint="is it the right file?", field=FIELD)
    if Path(path).suffix.lower() == ".json":
        try:
            values = json.loads(text, object_pairs_hook=lambda pairs: _once(path, pairs))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"models file {path} is not JSON: {error}", hint='write {"models": {...}}', field=FIELD
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(f"models file {path} is not an object", hint='write {"models": {...}}', field=FIELD)
        return values
    from quire.utils.yaml_config import parse_yaml  # late: few servers need it

    return _once(path, parse_yaml(path, text, kind="models file", field=FIELD))


def _once(path: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ConfigError(f"models file {path} has {name!r} twice", hint="keep one of them", field=FIELD)
        values[name] = value
    return values


def _switching(where: str, values: Mapping[str, Any]) -> SwitchingConfig:
    known = {info.name: info for info in map(info_of, settings_of(SwitchingConfig))}
    given: dict[str, Any] = {}
    for name, value in values.items():
        key = name.replace("-", "_")
        if key not in known:
            raise _at(where, unknown_name("setting", name, [*known, FIELD]))
        given[key] = _size(where, key, value) if known[key].is_size else value
    try:
        return SwitchingConfig(**{name: value for name, value in given.items() if value is not None})
    except QuireError as error:
        raise _at(where, error) from None


def _entry(where: str, name: object, entry: object, defaults: Mapping[str, Any]) -> ModelEntry:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: {shown(name)} is not a valid model name",
            hint="1 to 256 letters, digits and . _ - : / @ +; put a number in quotes", field=FIELD,
        )  # fmt: skip
    where = f"{where}, model {name}"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: {shown(entry)} is not a mapping", hint="write {model: PATH}", field=FIELD)
    try:
        return _checked_entry(name, {str(key).replace("-", "_"): value for key, value in entry.items()}, defaults)
    except QuireError as error:
        raise _at(where, error) from None


def _checked_entry(name: str, given: dict[str, Any], defaults: Mapping[str, Any]) -> ModelEntry:
    if not given.get("model"):
        raise ConfigError("model is missing", hint="write model: a directory, a GGUF file or a hub id", field="model")
    is_pinned = check_bool("pinned", given.pop("pinned", False), ConfigError)
    others = _names(given.pop("served_model_name", ()))
    api = {key: given.pop(key) for key in OWN_SERVER_SETTINGS if key in given}
    dataclasses.replace(ApiConfig(), **api)  # checks the values
    names = tuple(dict.fromkeys((name, *others)))
    known, of_server = settings_by_name(SECTIONS), settings_by_name(SERVER_SECTIONS)
    for key in given:
        if key in of_server and key not in known:
            raise ConfigError(
                f"{key} is a setting of the whole server", hint=f"give it to quire serve: --{key.replace('_', '-')}",
                field=key,
            )  # fmt: skip
    values = {**_without_others(defaults, given, known), **given, "served_model_name": list(names)}
    sized = {key: _parsed(known, key, value) for key, value in values.items()}
    config = build_config(**sized)
    if config.supervision.enable_sleep_mode:
        raise ConfigError(
            "enable_sleep_mode is not supported for several models: /models/unload and /models/load do that for each",
            hint="leave it out, or serve one model", field="enable_sleep_mode",
        )  # fmt: skip
    if config.supervision.sleeping_requests != "queue":
        raise ConfigError(
            "sleeping_requests has no effect for several models, which do not sleep", hint="leave it out",
            field="sleeping_requests",
        )  # fmt: skip
    if config.parallel.data_parallel_size > 1:
        raise UnsupportedError(
            "data_parallel_size is not supported for several models: one engine core is loaded and unloaded for each",
            hint="leave it out, or serve one model", field="data_parallel_size",
        )  # fmt: skip
    return ModelEntry(names=names, config=config, api=api, is_pinned=is_pinned)


def _names(given: Any) -> tuple[str, ...]:
    """Further names of a model, from one or a list."""
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list | tuple):
        raise wrong_type("served_model_name", given, "a name or a list of names", ConfigError)
    for one in names:
        if not NAME.fullmatch(check_text("served_model_name", one, ConfigError)):
            raise ConfigError(
                f"served_model_name={shown(one)} is not a valid model name",
                hint="1 to 256 letters, digits and . _ - : / @ +", field="served_model_name",
            )  # fmt: skip
    return tuple(names)


def _without_others(
    defaults: Mapping[str, Any], given: Mapping[str, Any], known: Mapping[str, Setting]
) -> dict[str, Any]:
    """`defaults` without the settings that are given under another of their names."""
    own = {known[key].info.name for key in given if key in known}
    return {key: value for key, value in defaults.items() if key not in known or known[key].info.name not in own}


def _parsed(known: Mapping[str, Setting], key: str, value: Any) -> Any:
    return _size("", key, value) if key in known and known[key].info.is_size else value


def _size(where: str, name: str, value: Any) -> Any:
    """A number of bytes or tokens from its text, such as 12GiB."""
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except ValueError:
        error = ConfigError(f"{name}={shown(value)} is not a size", hint="such as 12GiB, 512MiB or 16k", field=name)
        raise (_at(where, error) if where else error) from None


def _check_names(where: str, models: Iterable[ModelEntry]) -> None:
    """Refuse a name that stands for two models."""
    owners: dict[str, str] = {}
    for model in models:
        for name in model.names:
            if name in owners:
                raise ConfigError(
                    f"{where}: {name} is a name of {owners[name]} and of {model.name}", hint="rename one of them",
                    field="served_model_name",
                )  # fmt: skip
            owners[name] = model.name


def _at(where: str, error: QuireError) -> QuireError:
    """`error`, with the place it was found at."""
    return type(error)(f"{where}: {error.message}", hint=error.hint, field=error.field)


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Refuse engine settings that several models cannot have in common.

    Raises:
        ConfigError: the setting is named.
    """
    for name in ONE_CORE_EACH:
        if defaults.get(name) is not None:
            raise ConfigError(
                f"{name} names a place of one engine core", hint="give it to one model of the file", field=name
            )
