"""vLLM's `entrypoints.cli.main`: the `quire` command."""

from __future__ import annotations

from quire.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    raise SystemExit(main())
