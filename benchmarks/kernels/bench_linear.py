"""Products with packed weights against what the machine gives at most, and against torch.

Weights are rotated over copies so that they come from memory. "ideal" is the larger of the weights' bytes over the read
ceiling and the operations over the product ceiling, both measured just before; percent = ideal over the median.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json

import torch

from benchmarks.kernels.ceilings import CLOCKS, Ceilings, HugeBuffer, median_seconds
from quire.kernels.native.linear import linear, pack_rows, packed_shape
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference.linear import linear_in_order

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
SHAPES = ["896x896", "9728x896", "896x4864", "4096x4096"]


def check(runtime: NativeRuntime, dtype: torch.dtype) -> None:
    """Same bits as the reference, before anything is timed."""
    weight, x = torch.randn(100, 300).to(dtype), torch.randn(40, 300).to(dtype)
    packed = torch.zeros(packed_shape(100, 300, dtype), dtype=dtype)
    pack_rows(runtime, weight, packed, 0)
    actual = linear(runtime, x, packed, 100, out_dtype=torch.float32)
    assert torch.equal(actual, linear_in_order(x, weight)), "wrong result"


class Bench:
    """One dtype's weights of one shape, in as many copies as fit `total_bytes`."""

    def __init__(self, runtime: NativeRuntime, shape: tuple[int, int], dtype: torch.dtype, total_bytes: int) -> None:
        self.runtime, self.dtype = runtime, dtype
        self.output_size, self.input_size = shape
        weight = torch.randn(*shape).to(dtype)
        packed = packed_shape(*shape, dtype)
        num_elements = torch.Size(packed).numel()
        copies = max(1, total_bytes // (num_elements * dtype.itemsize))
        self._buffer = HugeBuffer(runtime, copies * num_elements * dtype.itemsize)
        self.packed = list(self._buffer.tensor(dtype).view(copies, *packed))
        pack_rows(runtime, weight, self.packed[0], 0)
        for copy in self.packed[1:]:
            copy.copy_(self.packed[0])
        self.weight_bytes = num_elements * dtype.itemsize
        self._plain_buffer = HugeBuffer(runtime, copies * weight.nbytes)
        self.plain = list(self._plain_buffer.tensor(dtype).view(copies, *shape))
        for copy in self.plain:
            copy.copy_(weight)

    def seconds(self, num_rows: int, rounds: int, clock: str) -> tuple[float, float]:
        """Median seconds of this kernel and of torch, alternating so that both see the same moment."""
        x = torch.randn(num_rows, self.input_size).to(self.dtype)
        out = torch.empty(num_rows, self.output_size, dtype=self.dtype)
        weights, plain = itertools.cycle(self.packed), itertools.cycle(self.plain)
        ours, torchs = [], []
        for _ in range(3):
            call = lambda: linear(self.runtime, x, next(weights), self.output_size, out=out)  # noqa: E731
            ours.append(median_seconds(call, rounds, clock=clock))
            of_torch = lambda: torch.nn.functional.linear(x, next(plain))  # noqa: E731
            torchs.append(median_seconds(of_torch, max(3, rounds // 2), clock=clock))
        return sorted(ours)[1], sorted(torchs)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16, 64, 512])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="thread: for one thread on a shared machine")
    parser.add_argument("--total-mib", type=int, default=256, help="weights rotated over")
    args = parser.parse_args()
    runtime, dtype = NativeRuntime(args.tier, args.threads), DTYPES[args.dtype]
    torch.set_num_threads(args.threads)
    check(runtime, dtype)
    ceilings = Ceilings(runtime, args.clock)
    results = []
    print("shape        rows       ms     GB/s  GFLOP/s  ideal%  product%   torch ms  torch/ours")
    for shape in args.shapes:
        output_size, input_size = (int(size) for size in shape.split("x"))
        bench = Bench(runtime, (output_size, input_size), dtype, args.total_mib << 20)
        for num_rows in args.rows:
            read, product = ceilings.measure("read", 3), ceilings.measure(args.dtype, 3)
            seconds, torch_seconds = bench.seconds(num_rows, args.rounds, args.clock)
            flops = 2 * num_rows * output_size * input_size
            ideal = max(bench.weight_bytes / read, flops / product)
            result = {
                "shape": shape, "rows": num_rows, "ms": seconds * 1e3, "gb_s": bench.weight_bytes / seconds / 1e9,
                "gflop_s": flops / seconds / 1e9, "ideal_percent": 100 * ideal / seconds,
                "product_percent": 100 * flops / product / seconds, "torch_ms": torch_seconds * 1e3,
            }  # fmt: skip
            results.append(result)
            print(
                f"{shape:12s} {num_rows:4d} {result['ms']:8.3f} {result['gb_s']:8.1f} {result['gflop_s']:8.1f} "
                f"{result['ideal_percent']:7.0f} {result['product_percent']:9.0f} {result['torch_ms']:10.3f} "
                f"{torch_seconds / seconds:11.2f}",
                flush=True,
            )
    print(json.dumps({"tier": runtime.tier, "threads": args.threads, "dtype": args.dtype, "results": results}))


if __name__ == "__main__":
    main()
