"""vLLM's `collect_env`: `python -m` this is `quire collect-env`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> int:
    """Print the versions and the machine; returns the exit status."""
    from quire.cli.main import main as quire_main

    return quire_main(["collect-env"])


if __name__ == "__main__":
    raise SystemExit(main())
