"""Whether drafts that are judged by ratios of probabilities keep the distribution, at length.

    python -m tests.statistics.rejection --count 100000

prints a line for each way in which drafts are made and verified, then the p of draws that are shared, which must fail,
and the smallest p of all ways at last, corrected for their number.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from quire.kernels.native.runtime import NativeRuntime
from quire.sample import drawn_drafts
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.sample.rng import STREAM_ACCEPT
from tests.statistics import drafting_engine
from tests.statistics.speculated import Way, all_of_them, try_out, ways

ENGINE_SHARE = 5
"""Of the continuations, the part that a whole engine writes, too."""


def p_values(count: int) -> Iterator[float]:
    """Of every way; prints them."""
    for ops in (NativeSamplingOps(NativeRuntime(num_threads=1)), TorchSamplingOps()):
        for name, way in ways():
            p, tokens_per_step = try_out(way, ops, count)
            print(f"{type(ops).__name__}, {name}: p = {p:.4f}, {tokens_per_step:.2f} tokens a step", flush=True)
            yield p
    with tempfile.TemporaryDirectory() as directory:
        engine = drafting_engine.DraftingEngine(Path(directory))
        for name, options in drafting_engine.WAYS.items():
            p, share = engine.try_out(**options, count=count // ENGINE_SHARE)
            print(f"engine with a draft model, {name}: p = {p:.4f}, {share:.0%} of the drafts stood", flush=True)
            yield p


def main() -> None:
    """Try every way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    count = parser.parse_args().count
    found = list(p_values(count))
    with mock.patch.object(drawn_drafts, "STREAM_DRAFT", STREAM_ACCEPT):
        ops = NativeSamplingOps(NativeRuntime(num_threads=1))
        shared = [try_out(Way(is_block, num_drafts=all_of_them), ops, count)[0] for is_block in (False, True)]
    print(f"drafts drawn by the numbers that judge them: p = {max(shared):.1e}")
    corrected = min(1.0, min(found) * len(found))
    print(f"{count} continuations each; smallest p of {len(found)}, times {len(found)}: {corrected:.4f}")
    if corrected <= 0.01 or max(shared) > 1e-9:
        sys.exit(1)


if __name__ == "__main__":
    main()
