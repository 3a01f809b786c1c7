"""Command-line flags and config files, generated from the config fields.

Called by every subcommand; `python -m quire.entrypoints.args --write-docs` writes the reference page.
A setting is declared once, in its config class. No state.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
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
from quire.config.not_yet import NO_EFFECT, NOT_YET, SEVERAL
from quire.config.resolve import Decision
from quire.config.server import ServerConfig
from quire.entrypoints.config_file import read_config_file
from quire.entrypoints.flag_forms import loose, plain_argv
from quire.entrypoints.help import ALL, HelpAction
from quire.errors import ConfigError, QuireError, unknown_name
from quire.utils.checks import shown
from quire.utils.other_names import FLAGS
from quire.utils.sizes import parse_size

__all__ = ["QuireParser", "add_engine_arguments", "build_config", "config_from_args", "describe_config"]

SHORT_FLAG = re.compile("-[a-z]+", re.ASCII)
SWITCHES = ("enable_", "disable_", "allow_", "async_", "use_", "skip_", "trust_")  # of settings that change nothing
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
            help="Show flags and exit: those of a topic, those that contain a word, or all.",
        )  # fmt: skip

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As usual, but flags may have vLLM's forms, and an unknown one is an error with the nearest valid one."""
        argv = plain_argv(sys.argv[1:] if args is None else args, self._option_string_actions)
        for token in argv[: argv.index("--") if "--" in argv else None]:
            # argparse would take -t for -tp, and -hf for -h with a value.
            if SHORT_FLAG.fullmatch(token) and token not in self._option_string_actions and token in FLAGS:
                raise self._unknown_flag(token)
        parsed, unknown = self.parse_known_args(argv, namespace)
        if not unknown:
            return parsed
        flag = next((one for one in unknown if one.startswith("-")), None)
        if flag is None:
            raise ConfigError(f"unexpected argument {shown(unknown[0])}", hint=f"see {self.prog} --help")
        raise self._unknown_flag(flag.partition("=")[0])

    def _unknown_flag(self, name: str) -> QuireError:
        everything = f"{self.prog} --help={ALL} shows every flag"
        return unknown_name("flag", name, self.visible_flags(), elsewhere=FLAGS, otherwise=everything)

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
        help="Show every setting, how each auto was resolved and why, then exit.",
    )  # fmt: skip
    sections = {**(also or {}), **SECTIONS}
    groups = {section: parser.add_argument_group(section, section_doc(section)) for section in sections}
    # Where any number of positional arguments may follow, a flag that took all would take them, too.
    many = "extend" if all(one.nargs in (None, "?") for one in parser._get_positional_actions()) else "append"
    for setting in all_settings(sections):
        _add_setting(groups[setting.section], setting.info, many)
    for name in NESTED:
        parser.add_argument(
            flag_of(name), dest=name, default=argparse.SUPPRESS, metavar="JSON",
            help=f"Several settings as a JSON object, named without {NESTED[name]}.",
        )  # fmt: skip
    known = settings_by_name(sections)
    for name in (*NOT_YET, *NO_EFFECT):
        if name not in known:
            _add_not_yet(parser, name)


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
    values.update({name: loose(given[name]) for name in (*NOT_YET, *NO_EFFECT) if name in given and name not in known})
    return values


def parse_text(info: SettingInfo, text: Any) -> Any:
    """The value of a setting from its text on the command line; booleans come as they are.

    Raises:
        ConfigError: the text is not of the setting's type.
    """
    if info.kind == "list":
        return ",".join(text) if info.splits else text[0] if len(text) == 1 else text
    if not isinstance(text, str) or info.kind == "str":
        return text
    if text.lower() == "auto" and info.auto is not None:
        return info.auto
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


def describe_config(config: QuireConfig, decisions: Sequence[Decision]) -> str:
    """Every setting of the engine on a line: name, value, and why when a rule chose it."""
    return _lines(settings_as_dict(config), {one.name: f"   <- auto: {one.reason}" for one in decisions})


def describe_settings(server: ServerConfig, sections: Mapping[str, type]) -> str:
    """Every setting of the server's `sections` on a line: name and value; of keys, that there are some."""
    return _lines(settings_as_dict(server, sections, hides_secrets=True), {})


def _lines(values: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    width = max(map(len, values))
    return "\n".join(f"{name:<{width}}  {_shown_value(one)}{reasons.get(name, '')}" for name, one in values.items())


def _shown_value(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value) or '""'


def _add_setting(group: argparse._ArgumentGroup, info: SettingInfo, many: str) -> None:
    flags = [flag_of(name) for name in (info.name, *info.aliases)]
    help_text = info.full_doc.replace("%", "%%") + (f" Allowed: {info.allowed}." if info.allowed else "")
    default = "" if info.default in (None, "", ()) else f" Default: {_shown_value(info.default).lower()}."
    common: dict[str, Any] = {"dest": info.name, "default": argparse.SUPPRESS, "help": help_text + default}
    if info.kind == "bool":
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, **common)
        return
    if info.kind == "list":
        nargs: dict[str, Any] = {"nargs": "+"} if many == "extend" else {}
        group.add_argument(*flags, action=many, metavar="TEXT", **nargs, **common)
        return
    if info.short is not None:
        flags.insert(0, info.short)
    group.add_argument(*flags, metavar=info.kind.upper(), **common)


def _add_not_yet(parser: argparse.ArgumentParser, name: str) -> None:
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    is_switch = name.startswith(SWITCHES) or any(isinstance(value, bool) for value in NOT_YET.get(name, ()))
    if name == "hf_token":
        parser.add_argument(flag_of(name), nargs="?", const=True, **common)
    elif is_switch:
        parser.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, **common)
    else:
        parser.add_argument(flag_of(name), nargs="+" if name in SEVERAL else None, **common)


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
