"""vLLM's `engine.arg_utils`: every setting of an engine as a field, made from the declarations in `quire.config`.

An `EngineArgs` is a mapping of the same names, so it goes wherever Quire takes settings by name.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quire.compat.vllm.utils.argparse_utils import FlexibleArgumentParser
from quire.config.build import NESTED, SECTIONS, all_settings, build_config
from quire.config.not_yet import NO_EFFECT, NOT_YET
from quire.entrypoints.args import QuireParser, add_engine_arguments, values_from_args

if TYPE_CHECKING:
    from quire.config import QuireConfig

__all__ = ["AsyncEngineArgs", "EngineArgs"]

_Args = TypeVar("_Args", bound="_Arguments")
_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)


def _defaults() -> dict[str, Any]:
    """Name -> default of everything an engine can be given; what Quire does not do yet has its neutral value."""
    defaults = {setting.info.name: setting.info.default for setting in all_settings(SECTIONS)}
    defaults.update(dict.fromkeys(NESTED))
    for name, neutral in NOT_YET.items():
        defaults.setdefault(name, neutral[0])
    for name in NO_EFFECT:
        defaults.setdefault(name, None)
    return defaults


class _Arguments(Mapping[str, Any]):
    """What every class of engine arguments can do; its fields are the settings."""

    def __getitem__(self, name: str) -> Any:
        if name in _FIELDS:
            return getattr(self, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_FIELDS)

    def __len__(self) -> int:
        return len(_FIELDS)

    @classmethod
    def add_cli_args(cls, parser: _Parser) -> _Parser:
        """Give `parser` a flag for each setting, where it has none of that name yet; returns it."""
        _add_missing(parser, QuireParser(prog=parser.prog))
        if isinstance(parser, FlexibleArgumentParser):
            parser.typed_defaults = dict(_FIELDS)
        return parser

    @classmethod
    def from_cli_args(cls: type[_Args], args: argparse.Namespace) -> _Args:
        """The settings among parsed flags, others left out.

        Raises:
            ConfigError: a text is not of its setting's type.
        """
        values = {**vars(args), **values_from_args(args, SECTIONS)}
        return cls(**{name: value for name, value in values.items() if name in _FIELDS})

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> QuireConfig:
        """The configuration that these settings make; raises as `build_config`."""
        return build_config(**self)


def _add_missing(parser: argparse.ArgumentParser, scratch: QuireParser) -> None:
    """The engine's flags, group by group, without those that the program has itself."""
    add_engine_arguments(scratch)
    taken = set(parser._option_string_actions)
    for group in scratch._action_groups:
        added = parser.add_argument_group(group.title, group.description)
        for action in group._group_actions:
            action.option_strings = [flag for flag in action.option_strings if flag not in taken]
            if action.option_strings:
                added._add_action(action)


_FIELDS = _defaults()
_DECLARED: list[Any] = [
    (name, Any, dataclasses.field(default_factory=partial(copy.copy, default), kw_only=name != "model"))
    for name, default in _FIELDS.items()
]

EngineArgs = dataclasses.make_dataclass("EngineArgs", _DECLARED, bases=(_Arguments,), eq=False)
EngineArgs.__module__ = __name__
EngineArgs.__doc__ = "Settings of an engine, by keyword; docs/reference/settings.md lists them."
AsyncEngineArgs = dataclasses.make_dataclass("AsyncEngineArgs", [], bases=(EngineArgs,), eq=False)
AsyncEngineArgs.__module__ = __name__
AsyncEngineArgs.__doc__ = "As `EngineArgs`, for an engine on an event loop."
