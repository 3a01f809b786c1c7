"""`python -m quire.entrypoints.openai.api_server`: the same as `quire serve`, under the name that vLLM's users type."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, with the flags of `quire serve`; returns the exit status."""
    # By name: this is an entry point beside the command line's, which stands above this package.
    command_line = importlib.import_module("quire.cli.main")
    return int(command_line.main(["serve", *(sys.argv[1:] if argv is None else argv)]))


if __name__ == "__main__":
    raise SystemExit(main())
