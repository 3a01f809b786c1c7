"""Command-line flags and config files, generated from the config fields.

Called by every subcommand; `python -m quire.entrypoints.args --write-docs` writes the reference page.
A setting is declared once, in its config class. No state.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quire.config import QuireConfig
from quire.config.base import SettingInfo
from quire.config.build import (
    NESTED,
    SECTIONS,
    all_settings,
    build_config,
    section_doc,
    settings_as_dict,
    settings_by_name,
)
from quire.config.not_yet import NOT_YET
from quire.config.resolve import Decision
from quire.entrypoints.help import HelpAction
from quire.errors import ConfigError, unknown_name
from quire.utils.checks import shown

__all__ = ["QuireParser", "add_engine_arguments", "build_config", "config_from_args", "describe_config"]

MAX_CONFIG_FILE_BYTES = 1 << 20
SIZE_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class QuireParser(argparse.ArgumentParser):
    """An argument parser whose mistakes are `ConfigError`s that name the nearest valid flag."""

    def __init__(self, prog: str, description: str = "") -> None:
        formatter = argparse.ArgumentDefaultsHelpFormatter
        super().__init__(
            prog=prog, description=description, formatter_class=formatter, allow_abbrev=False, add_help=False
        )
        self.add_argument(
            "-h", "--help", nargs="?", action=HelpAction, default=argparse.SUPPRESS, metavar="TOPIC",
            help="Show flags and exit: of a topic, with a word in them, or all.",
        )  # fmt: skip

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As usual, but an unknown flag is an error with the nearest valid one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return parsed
        flag = next((one for one in unknown if one.startswith("-")), None)
        if flag is None:
            raise ConfigError(f"unexpected argument {shown(unknown[0])}", hint=f"see {self.prog} --help")
        raise unknown_name("flag", flag.partition("=")[0], self.visible_flags())

    def visible_flags(self) -> list[str]:
        """Every long flag that `--help` shows."""
        return [
            flag
            for action in self._actions
            if action.help is not argparse.SUPPRESS
            for flag in action.option_strings
            if flag.startswith("--")
        ]

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing usage and exiting."""
        raise ConfigError(message, hint=f"see {self.prog} --help")


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def add_engine_arguments(parser: argparse.ArgumentParser, *, also: Mapping[str, type] | None = None) -> None:
    """Add a flag for every setting, `--config` and `--print-config`; read them back with `config_from_args`.

    Args:
        also: further sections; read these back with `values_from_args`.
    """
    top = parser.add_argument_group("configuration")
    top.add_argument(
        "--config", metavar="FILE", default=argparse.SUPPRESS, help="JSON or YAML file of settings; flags win."
    )
    top.add_argument(
        "--print-config", action="store_true", default=argparse.SUPPRESS,
        help="Show every setting, what each auto became and why, then exit.",
    )  # fmt: skip
    sections = {**(also or {}), **SECTIONS}
    groups = {section: parser.add_argument_group(section, section_doc(section)) for section in sections}
    for setting in all_settings(sections):
        _add_setting(groups[setting.section], setting.info)
    for name in NESTED:
        parser.add_argument(
            flag_of(name), dest=name, default=argparse.SUPPRESS, metavar="JSON",
            help=f"Several settings at once, as an object of their names without {NESTED[name]}.",
        )  # fmt: skip
    known = settings_by_name(sections)
    for name, neutral in NOT_YET.items():
        if name not in known:
            _add_not_yet(parser, name, neutral)


def config_from_args(args: argparse.Namespace, **defaults: Any) -> QuireConfig:
    """The configuration that the flags, over the config file, over `defaults`, make.

    Raises:
        ConfigError, UnsupportedError: as `build_config`; the field is the setting's name.
    """
    return build_config(**{**defaults, **values_from_args(args, SECTIONS)})


def values_from_args(args: argparse.Namespace, sections: Mapping[str, type]) -> dict[str, Any]:
    """What the flags, over the config file, give for the settings of `sections`; of the file, every name."""
    given = vars(args)
    values = read_config_file(given["config"]) if "config" in given else {}
    known = settings_by_name(sections)
    for setting in all_settings(sections):
        name = setting.info.name
        if name in given:
            for other in (name, *setting.info.aliases):
                values.pop(other, None)
            values[name] = parse_text(setting.info, given[name])
    values.update({name: given[name] for name in NESTED if name in given})
    values.update({name: _loose(given[name]) for name in NOT_YET if name in given and name not in known})
    return values


def read_config_file(path: str) -> dict[str, Any]:
    """Settings from a JSON or YAML file: one object of name -> value; names may be written with dashes.

    Raises:
        ConfigError: the file is missing, too large, malformed, or not one object.
    """
    file = Path(path)
    if file.suffix.lower() == ".toml":
        raise ConfigError(f"config file {path}: .toml is not read", hint="write it as YAML or JSON", field="config")
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
        from quire.entrypoints.yaml_config import parse_yaml

        return _refuse_duplicates(parse_yaml(path, text))
    try:
        values = json.loads(text, object_pairs_hook=_refuse_duplicates)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"config file {path} is not JSON: {error}", hint='write {"setting": value, ...}', field="config"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} is not one object", hint='write {"setting": value, ...}', field="config")
    return values


def parse_text(info: SettingInfo, text: Any) -> Any:
    """The value of a setting from its text on the command line; booleans come as they are.

    Raises:
        ConfigError: the text is not of the setting's type.
    """
    if not isinstance(text, str) or info.kind == "str":
        return text
    if text.lower() in ("none", "auto") and info.is_optional:
        return None
    try:
        if info.kind == "bool":
            return BOOLEANS[text.lower()]
        if info.kind == "float":
            return float(text)
        return parse_size(text) if info.is_size else int(text)
    except (KeyError, ValueError):
        expected = {"int": "an integer", "float": "a number", "bool": "true or false"}[info.kind]
        hint = f"{info.name} takes {expected}" + (f": {info.allowed}" if info.allowed else "")
        raise ConfigError(f"{flag_of(info.name)} {shown(text)} is not {expected}", hint=hint, field=info.name) from None


def parse_size(text: str) -> int:
    """An integer with an optional unit: "16k" is 16,000; "16K", "16KiB" are 16,384; "1.5k" is 1,500."""
    number = text.strip()
    for suffix in ("iB", "ib", "B"):
        number = number.removesuffix(suffix) if number[-len(suffix) - 1 : -len(suffix)] in SIZE_UNITS else number
    if number and number[-1] in SIZE_UNITS:
        scaled = float(number[:-1]) * SIZE_UNITS[number[-1]]
        if not scaled.is_integer():
            raise ValueError(f"{text} is not a whole number")
        return int(scaled)
    return int(number)


def describe_config(config: QuireConfig, decisions: Sequence[Decision]) -> str:
    """Every setting on a line: name, value, and why when a rule chose it."""
    reasons = {decision.name: f"   <- auto: {decision.reason}" for decision in decisions}
    shown_values = {name: "none" if one is None else str(one) for name, one in settings_as_dict(config).items()}
    width = max(map(len, shown_values))
    return "\n".join(f"{name:<{width}}  {text}{reasons.get(name, '')}" for name, text in shown_values.items())


def _add_setting(group: argparse._ArgumentGroup, info: SettingInfo) -> None:
    flags = [flag_of(name) for name in (info.name, *info.aliases)]
    help_text = info.doc.replace("%", "%%") + (f" Allowed: {info.allowed}." if info.allowed else "")
    default = "" if info.default is None else f" Default: {str(info.default).lower()}."
    common: dict[str, Any] = {"dest": info.name, "default": argparse.SUPPRESS, "help": help_text + default}
    if info.kind == "bool":
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        return
    if info.short is not None:
        flags.insert(0, info.short)
    group.add_argument(*flags, metavar=info.kind.upper(), **common)


def _add_not_yet(parser: argparse.ArgumentParser, name: str, neutral: tuple[Any, ...]) -> None:
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    if any(isinstance(value, bool) for value in neutral):
        parser.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, **common)
    else:
        parser.add_argument(flag_of(name), **common)


def _loose(value: Any) -> Any:
    """The value of a not-yet-supported flag: JSON when it is, else text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        name = key.replace("-", "_")
        if name in values:
            raise ConfigError(f"the config file gives {name!r} twice", hint="give it once", field=name)
        values[name] = value
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Write the reference pages, or print them."""
    # Late: only this needs the sampling parameters, and flags are parsed before anything heavy is imported.
    from quire.entrypoints.reference import REFERENCE_DIR, reference_pages

    parser = QuireParser(prog="python -m quire.entrypoints.args", description="The generated reference pages.")
    parser.add_argument("--write-docs", action="store_true", help="write them to docs/reference")
    write = parser.parse_args(argv).write_docs
    for name, content in reference_pages().items():
        if write:
            (REFERENCE_DIR / name).write_text(content, encoding="utf-8")
        else:
            sys.stdout.write(content)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
