"""vLLM's `entrypoints.openai.run_batch`: `python -m` this is `quire run-batch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Process a file of requests with the flags of `quire run-batch`; returns the exit status."""
    from quire.cli.main import main as quire_main

    return quire_main(["run-batch", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    raise SystemExit(main())
