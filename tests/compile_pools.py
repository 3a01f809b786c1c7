"""Engines of one process that compile their grammars in the same processes: to start one takes as long as a small test.

`with shared_compile_pools():` around engines. Engines of models with the same tokenizer have one pool.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from quire.engine import grammar_gate
from quire.structured_output.compile.fast_budget import FastBudget
from quire.structured_output.compile.messages import WorkerSetup
from quire.structured_output.compile.pool import CompilePool


class SharedPool(CompilePool):
    """Its engines come and go; it ends with `end`."""

    def close(self) -> None:
        """An engine does not need it any more."""

    def end(self) -> None:
        """End the workers."""
        super().close()


@contextmanager
def shared_compile_pools() -> Iterator[None]:
    """Engines that are made meanwhile share their pools, which end afterwards."""
    pools: dict[tuple[object, ...], SharedPool] = {}

    def pool_of(setup: WorkerSetup, fast_budget: FastBudget | None = None) -> CompilePool:
        path = Path(setup.tokenizer_path)
        tokenizer = hashlib.sha256((path / "tokenizer.json").read_bytes()).digest() if path.is_dir() else path
        key = (
            tokenizer, setup.vocab_size, setup.eos_token_id, setup.cpu_s, setup.memory_bytes,
            fast_budget is None,
        )  # fmt: skip
        if key not in pools:
            pools[key] = SharedPool(setup, fast_budget)
        return pools[key]

    try:
        with patch.object(grammar_gate, "CompilePool", pool_of):
            yield
    finally:
        for pool in pools.values():
            pool.end()
