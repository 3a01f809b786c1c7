"""Linear layers on weights in block formats: time, bytes of weights per second, products per second, packing.

Weights rotate over copies beyond the caches. Both ceilings, of reading memory and of integer products, are measured in
the same run (ceilings.py). Random data throughout. Run it alone on the machine, or with `--threads 1 --clock thread`.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from benchmarks.kernels.bench_quant import huge_tensor, median_seconds
from benchmarks.kernels.ceilings import CLOCKS, Ceilings
from quire.kernels.native.block_quant import BLOCK_KERNELS, BlockKernel
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference.block_formats import dequantize_blocks
from quire.kernels.reference.block_linear import linear as reference_linear
from tests.kernels.native.blocks import random_blocks

# Outputs and inputs of the projections of Qwen2.5-0.5B whose inputs are whole blocks of 256, and of Llama-3.2-1B.
SHAPES = [(896, 4864), (8192, 2048), (2048, 8192), (2048, 2048)]
ROWS = [1, 8, 64, 512]


class Case:
    """One weight in `copies` copies, packed."""

    def __init__(self, runtime: NativeRuntime, kernel: BlockKernel, size: tuple[int, int], rotated_bytes: int) -> None:
        self.runtime, self.kernel, self.size = runtime, kernel, size
        packed_shape = kernel.packed_shape(*size)
        self.weight_bytes = int(torch.Size(packed_shape).numel())
        self.copies = max(1, min(400, rotated_bytes // self.weight_bytes))
        self.packed = huge_tensor(runtime, (self.copies, *packed_shape), torch.uint8)
        self.blocks = random_blocks(kernel, *size)
        kernel.pack_rows(runtime, self.blocks, self.packed[0], 0)
        start = time.perf_counter()
        kernel.pack_rows(runtime, self.blocks, self.packed[0], 0)
        self.pack_s = time.perf_counter() - start
        for copy in range(1, self.copies):
            self.packed[copy].copy_(self.packed[0])

    def run(self, x: torch.Tensor, copy: int) -> torch.Tensor:
        """The product with one of the copies."""
        return self.kernel.linear(self.runtime, x, self.packed[copy % self.copies], self.size[0])

    def check(self) -> None:
        """The product of a few rows against float64."""
        x = torch.randn(3, self.size[1])
        expected, magnitude = reference_linear(x, dequantize_blocks(self.kernel.name, self.blocks))
        difference = (self.run(x, 0).double() - expected).abs()
        assert bool((difference <= 1e-5 * magnitude).all()), "wrong result"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", choices=BLOCK_KERNELS, default=list(BLOCK_KERNELS))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--shapes", type=int, nargs="+", default=list(range(len(SHAPES))))
    parser.add_argument("--budget", type=float, default=0.25, help="seconds per figure")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="thread: for one thread on a shared machine")
    parser.add_argument("--rotated-mib", type=int, default=192)
    args = parser.parse_args()
    runtime = NativeRuntime(args.tier, num_threads=args.threads)
    ceilings = Ceilings(runtime, args.clock)
    ceiling, rate = ceilings.measure("read"), ceilings.measure("int8")
    print(
        f"tier {runtime.tier}, {args.threads} threads: reads {ceiling / 1e9:.1f} GB/s, {rate / 1e9:.0f} GOP/s at most"
    )
    names = f"{'ms':>8} {'GB/s':>6} {'%read':>6} {'GOP/s':>6} {'%rate':>6}"
    print(f"{'format':>7} {'outputs x inputs':>18} {'rows':>5} {names}")
    figures = []
    for name in args.formats:
        for size in (SHAPES[index] for index in args.shapes):
            case = Case(runtime, BLOCK_KERNELS[name], size, args.rotated_mib << 20)
            case.check()
            for num_rows in args.rows:
                x = torch.randn(num_rows, size[1], dtype=torch.bfloat16)
                seconds = median_seconds(lambda i, x=x, case=case: case.run(x, i), args.budget, args.clock)  # type: ignore[misc]
                read, products = case.weight_bytes / seconds, 2 * num_rows * size[0] * size[1] / seconds
                share = f"{100 * products / rate:>6.1f}" if rate else "     -"
                print(
                    f"{name:>7} {size[0]:>9} x {size[1]:>6} {num_rows:>5} {seconds * 1e3:>8.3f} {read / 1e9:>6.1f} "
                    f"{100 * read / ceiling:>6.1f} {products / 1e9:>6.0f} {share}"
                )
                figures.append({"format": name, "size": size, "rows": num_rows, "ms": seconds * 1e3})
            print(f"        packed in {case.pack_s * 1e3:.1f} ms ({case.blocks.numel() / case.pack_s / 1e9:.2f} GB/s)")
            runtime.library.unmap_huge(case.packed.data_ptr(), case.packed.numel())
    print(json.dumps({"tier": runtime.tier, "read_gb_s": ceiling / 1e9, "int8_gop_s": rate / 1e9, "runs": figures}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
