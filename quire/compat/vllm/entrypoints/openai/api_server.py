"""vLLM's `entrypoints.openai.api_server`: `python -m` this is `quire serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with the flags of `quire serve`; returns the exit status."""
    from quire.cli.main import main as quire_main

    return quire_main(["serve", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
