"""A `QuireConfig` from flat names, as `LLM(...)`, the command line and a config file give them.

Called by `entrypoints.args` and `LLM`. No state: the table of names is read from the config classes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.base import SettingInfo, info_of, settings_of
from quire.config.cache import CacheConfig
from quire.config.cross_checks import check_supported
from quire.config.device import DeviceConfig, ParallelConfig
from quire.config.dynamo import DynamoConfig
from quire.config.engine import ObservabilityConfig, QuireConfig, SupervisionConfig
from quire.config.kv_transfer import KVTransferSettings
from quire.config.model import LoadConfig, ModelConfig
from quire.config.needs import check_needs
from quire.config.not_yet import NO_EFFECT, NOT_YET, is_neutral, not_yet_error
from quire.config.scheduler import SchedulerConfig
from quire.config.server import (
    ApiConfig,
    HeadlessConfig,
    HttpConfig,
    LimitsConfig,
    ResponsesConfig,
    ServerConfig,
    TracingConfig,
    UsageConfig,
)
from quire.config.speculative_forms import SpeculationSettings, parse_speculation
from quire.config.structured_outputs import StructuredOutputsConfig
from quire.errors import ConfigError, UnsupportedError, unknown_name
from quire.logger import get_logger
from quire.utils.checks import shown
from quire.utils.other_names import FLAGS

logger = get_logger(__name__)

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "load": LoadConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "device": DeviceConfig,
    "parallel": ParallelConfig,
    "observability": ObservabilityConfig,
    "supervision": SupervisionConfig,
    "structured_outputs": StructuredOutputsConfig,
    "speculation": SpeculationSettings,
    "transfer": KVTransferSettings,
}
# Settings that are objects: their keys, with this in front, are settings of their own.
NESTED: dict[str, str] = {"structured_outputs_config": "structured_outputs_"}
# Keys of such objects that are known but not supported yet, with the values that ask for nothing.
_NESTED_NOT_YET: dict[str, tuple[Any, ...]] = {
    "reasoning_parser_plugin": (None, ""),
}  # fmt: skip
SERVER_SECTIONS: dict[str, type] = {
    "http": HttpConfig, "api": ApiConfig, "limits": LimitsConfig, "tracing": TracingConfig,
    "responses": ResponsesConfig, "usage": UsageConfig, "headless": HeadlessConfig,
}  # fmt: skip
DYNAMO_SECTIONS: dict[str, type] = {"dynamo": DynamoConfig}


# Names of other programs' settings, and of earlier versions -> what to do here.
_SETTINGS_ELSEWHERE = {flag[2:].replace("-", "_"): hint for flag, hint in FLAGS.items() if flag.startswith("--")}
HIDDEN = "(hidden)"
SECRET = re.compile(
    r"(?i)passw|secret|(?:token|api_?key)\W+\w{16}|[?&;](?:token|key|api_?key|auth|sig(?:nature)?)=|://[^/\s:@]*:[^@\s/]+@"
    r"|\bhf_\w{16}"
)
"""What a connector's settings may hold: passwords, tokens and keys by name or form, and those in addresses."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a setting lives: `QuireConfig.<section>.<field>`."""

    section: str
    field: str
    info: SettingInfo


def all_settings(sections: Mapping[str, type] = SECTIONS) -> list[Setting]:
    """Every setting of the engine (or of other sections), in the order of the config classes."""
    return [
        Setting(section, field.name, info_of(field))
        for section, config in sections.items()
        for field in settings_of(config)
    ]


def settings_by_name(sections: Mapping[str, type] = SECTIONS) -> dict[str, Setting]:
    """Every setting under each of its names, aliases included."""
    return {name: one for one in all_settings(sections) for name in (one.info.name, *one.info.aliases)}


def build_config(**values: Any) -> QuireConfig:
    """The configuration that the given settings make; what is not given has its default.

    Args:
        values: settings by user-facing name or alias, as in `max_model_len=2048`. None means the default.

    Raises:
        ConfigError: a name is unknown (the nearest valid one is named), a value is not allowed, or lacks what it needs.
        UnsupportedError: a known setting that Quire does not honour yet.
    """
    known = settings_by_name()
    sections: dict[str, dict[str, Any]] = {}
    for name, value in _flat(values, known):
        if name in known:
            _put(sections, known[name], name, value)
        elif name != "data_parallel_size_local" or value != (values.get("data_parallel_size") or 1):  # all are local
            _drop_neutral(name, value, known)
    config = QuireConfig(**{section: SECTIONS[section](**fields) for section, fields in sections.items()})
    useless = check_needs(config)
    check_supported(config)
    for note in (*useless, *parse_speculation(config.speculation)[1]):
        logger.warning("%s", note)
    return config


def _flat(values: Mapping[str, Any], known: Iterable[str]) -> list[tuple[str, Any]]:
    """`values` with the keys of nested settings among them."""
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        if name not in NESTED:
            flat.append((name, value))
            continue
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise ConfigError(
                    f"{name}={shown(value)} is not JSON", hint='write {"key": value}', field=name
                ) from None
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{name}={shown(value)} is not a JSON object", hint='write {"key": value}', field=name)
        for key, item in (value or {}).items():
            neutral = _NESTED_NOT_YET.get(key)
            if neutral is not None and any(type(item) is type(one) and item == one for one in neutral):
                continue
            if neutral is not None:
                raise UnsupportedError(
                    f"{name}.{key} is a vLLM option that Quire does not implement yet",
                    hint=f"leave out {key}",
                    field=name,
                )
            flat.append((_nested_name(name, str(key), known), item))
    return flat


def _nested_name(name: str, key: str, known: Iterable[str]) -> str:
    """The setting that `key` of the nested setting `name` is."""
    allowed = [one.removeprefix(NESTED[name]) for one in known if one.startswith(NESTED[name])]
    if key not in allowed:
        raise unknown_name(f"key of {name}", key, allowed)
    return NESTED[name] + key


def build_server_config(**values: Any) -> ServerConfig:
    """The server that the given settings make; what is not given has its default.

    Raises:
        ConfigError: a name is unknown, a value is not allowed, or lacks what it needs.
    """
    known = settings_by_name(SERVER_SECTIONS)
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in known:
            raise unknown_name("server setting", name, known)
        _put(sections, known[name], name, value)
    config = ServerConfig(**{section: SERVER_SECTIONS[section](**fields) for section, fields in sections.items()})
    for note in check_needs(config):
        logger.warning("%s", note)
    return config


def _put(sections: dict[str, dict[str, Any]], setting: Setting, name: str, value: Any) -> None:
    if value is None and setting.info.default is not None:
        return
    fields = sections.setdefault(setting.section, {})
    if setting.field in fields:
        raise ConfigError(
            f"{name} and another name of the same setting were both given",
            hint=f"give {setting.info.name} once",
            field=setting.info.name,
        )
    fields[setting.field] = os.fspath(value) if isinstance(value, os.PathLike) else value


def _drop_neutral(name: str, value: Any, known: Iterable[str]) -> None:
    if name in NO_EFFECT:
        if value is not None:
            logger.info("%s=%s has no effect: %s", name, shown(value), NO_EFFECT[name])
        return
    if name not in NOT_YET:
        valid, otherwise = [*known, *NOT_YET, *NO_EFFECT], "docs/reference/settings.md lists all settings"
        raise unknown_name("setting", name, valid, elsewhere=_SETTINGS_ELSEWHERE, otherwise=otherwise)
    if not is_neutral(name, value):
        raise not_yet_error(name, value)


def settings_as_dict(
    config: QuireConfig | ServerConfig, sections: Mapping[str, type] = SECTIONS, *, hides_secrets: bool = False
) -> dict[str, Any]:
    """User-facing name -> value of every setting of the sections; of secrets only that there are some, when hidden."""
    values: dict[str, Any] = {}
    for one in all_settings(sections):
        value = getattr(getattr(config, one.section), one.field)
        values[one.info.name] = HIDDEN if hides_secrets and one.info.is_secret and value else value
    return values


def public_settings(config: QuireConfig | ServerConfig, sections: Mapping[str, type] = SECTIONS) -> dict[str, Any]:
    """As `settings_as_dict`, without secrets and whatever looks like one."""
    values = settings_as_dict(config, sections, hides_secrets=True)
    return {name: HIDDEN if SECRET.search(str(value)) else value for name, value in values.items()}


def public_config(config: QuireConfig) -> dict[str, Any]:
    """`config` as nested objects, as it was resolved, without what looks like a secret."""
    found: dict[str, Any] = _without_secrets("", dataclasses.asdict(config))
    return found


def _without_secrets(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(str(key), one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_secrets(name, one) for one in value]
    return HIDDEN if isinstance(value, str) and SECRET.search(f"{name}: {value}") else value


def section_doc(section: str) -> str:
    """What a section of the configuration is about."""
    return ({**SECTIONS, **SERVER_SECTIONS, **DYNAMO_SECTIONS}[section].__doc__ or "").strip()
