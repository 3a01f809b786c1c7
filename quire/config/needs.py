"""Settings that act only together with another, or not beside another: refused where they would do nothing.

A field declares it (`setting(needs=..., overruled_by=...)`); called by `config.build` once all values are known. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from quire.config.base import SettingInfo, info_of, settings_of
from quire.errors import ConfigError

OFF = ("none", "off")


def check_needs(config: Any) -> None:
    """Refuse every setting of `config` (a dataclass of config dataclasses) that was set and has no effect.

    Raises:
        ConfigError: the setting is named, and what it needs or what overrules it.
    """
    sections = [section for one in fields(config) if is_dataclass(section := getattr(config, one.name))]
    found = [(info_of(one), getattr(section, one.name)) for section in sections for one in settings_of(type(section))]
    values = {info.name: value for info, value in found}
    for info, value in found:
        if value != info.default and (value or info.default):  # 0 for None asks for nothing
            _check(info, values)


def _check(info: SettingInfo, values: Mapping[str, Any]) -> None:
    if info.needs and not any(is_on(values[name]) for name in info.needs):
        needed = " or ".join(info.needs)
        raise ConfigError(
            f"{info.name} has no effect without {needed}", hint=f"set {needed}, or leave out {info.name}",
            field=info.name,
        )  # fmt: skip
    for name in info.overruled_by:
        if is_on(values[name]):
            raise ConfigError(
                f"{info.name} has no effect with {name}", hint=f"leave out {info.name} or {name}", field=info.name
            )


def is_on(value: object) -> bool:
    """Whether a setting with `value` asks for something."""
    return bool(value) and value not in OFF
