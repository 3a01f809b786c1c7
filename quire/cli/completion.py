"""Print a script that completes quire's commands and flags in a shell.

    quire completion bash > ~/.local/share/bash-completion/completions/quire
    quire completion zsh > ~/.zfunc/_quire           # with fpath+=~/.zfunc before compinit

Scripts are made by shtab; make them anew after an update.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping

import shtab

from quire.config.build import SECTIONS, SERVER_SECTIONS, Setting, settings_by_name
from quire.entrypoints.args import QuireParser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="Shell to print the script for.")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    print(shtab.complete(whole_parser(), shell=args.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Every command with its flags, as one parser; only for looking at."""
    # Late: `main` imports this module by name.
    from quire.cli.main import COMMANDS

    parser = argparse.ArgumentParser(prog="quire", add_help=False)
    settings = settings_by_name({**SECTIONS, **SERVER_SECTIONS})
    families = {"": parser.add_subparsers(parser_class=_Plain)}
    for command, (module, description) in COMMANDS.items():
        family, _, name = command.rpartition(" ")
        if family not in families:
            families[family] = families[""].add_parser(family, help=f"{family} ...").add_subparsers(parser_class=_Plain)
        one = families[family].add_parser(name, help=description)
        importlib.import_module(module).add_arguments(one)
        _prepare(one, settings)
    return parser


class _Plain(QuireParser):
    """A `QuireParser` as argparse makes parsers of subcommands."""

    def __init__(self, *, prog: str) -> None:
        super().__init__(prog)


def _prepare(parser: argparse.ArgumentParser, settings: Mapping[str, Setting]) -> None:
    """Leave out what `--help` does not show and what shells would expand; offer the values of settings."""
    parser._actions = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    for action in parser._actions:
        action.help = (action.help or "").partition("\n")[0].replace("%(default)s", str(action.default))
        if action.dest in settings:
            action.choices = settings[action.dest].info.choices
