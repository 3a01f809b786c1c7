"""Settings that act only together with another are refused without it; those that another overrules are named.

A field declares it (`setting(needs=..., overruled_by=...)`); called by `config.build` once all values are known. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from quire.config.base import SettingInfo, info_of, settings_of
from quire.errors import ConfigError

OFF = ("none", "off")


def check_needs(config: Any) -> list[str]:
    """Refuse every setting of `config` (a dataclass of config dataclasses) that was set and lacks what it needs.

    Returns:
        A note on each that another setting makes useless: vLLM takes such pairs, so that scripts have them.

    Raises:
        ConfigError: the setting is named, and what it needs.
    """
    sections = [section for one in fields(config) if is_dataclass(section := getattr(config, one.name))]
    found = [(info_of(one), getattr(section, one.name)) for section in sections for one in settings_of(type(section))]
    values = {info.name: value for info, value in found}
    given = [info for info, value in found if value != info.default and (value or info.default)]  # 0 for None is none
    for info in given:
        _check(info, values)
    return [
        f"{info.name} has no effect with {name}; leave one of them out"
        for info in given
        for name in info.overruled_by
        if is_on(values[name])
    ]


def _check(info: SettingInfo, values: Mapping[str, Any]) -> None:
    if info.needs and not any(is_on(values[name]) for name in info.needs):
        needed = " or ".join(info.needs)
        raise ConfigError(
            f"{info.name} has no effect without {needed}", hint=f"set {needed}, or leave out {info.name}",
            field=info.name,
        )  # fmt: skip


def is_on(value: object) -> bool:
    """Whether a setting with `value` asks for something."""
    return bool(value) and value not in OFF
