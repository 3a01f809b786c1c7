"""vLLM's `utils.argparse_utils`: a command line whose flags take every form that `quire serve` takes.

Flags may be written with underscores, dotted or with several values, as `quire.entrypoints.args` reads them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.entrypoints.args import QuireParser
from quire.errors import QuireError

__all__ = ["FlexibleArgumentParser"]


class FlexibleArgumentParser(QuireParser):
    """An argument parser for programs with engine flags; a mistake ends the program with status 2.

    Attributes:
        typed_defaults: setting -> default, once engine flags were added (`EngineArgs.add_cli_args`): a parsed
            namespace then has every setting, in its own type.
    """

    def __init__(self, prog: str | None = None, description: str | None = "", **others: Any) -> None:
        super().__init__(prog=prog or Path(sys.argv[0]).name, description=description or "")
        self.typed_defaults: dict[str, Any] = {}
        for name, value in others.items():
            setattr(self, name, value)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """The parsed flags, the engine's among them as Python values."""
        # Late: a parser without engine flags needs no settings.
        from quire.config.build import SECTIONS
        from quire.entrypoints.args import values_from_args

        try:
            parsed = super().parse_args(args, namespace)
            if self.typed_defaults:
                given = values_from_args(parsed, SECTIONS)
                vars(parsed).pop("config", None)
                vars(parsed).update(given)
        except QuireError as error:
            self.print_usage(sys.stderr)
            self.exit(2, f"{self.prog}: error: {error}\n")
        for name, default in self.typed_defaults.items():
            if not hasattr(parsed, name):
                setattr(parsed, name, default)
        return parsed

    @staticmethod
    def check_port(text: str) -> int:
        """The number of a port that programs without special rights may use: 1024 to 65535."""
        port = int(text)
        if not 1024 <= port <= 65535:
            raise argparse.ArgumentTypeError("a port is a number from 1024 to 65535")
        return port
