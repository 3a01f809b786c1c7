"""vLLM's `entrypoints.openai.api_server`: `python -m` this is `quire serve`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import SERVER

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Serve with the flags of `quire serve`; returns the exit status."""
    from quire.cli.main import main as quire_main

    return quire_main(["serve", *(sys.argv[1:] if argv is None else argv)])


__getattr__ = module_getattr(
    __name__,
    absent_names=dict.fromkeys(
        ("build_app", "build_async_engine_client", "init_app_state", "router", "run_server", "run_server_worker",
         "setup_server"), SERVER,
    ),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main())
