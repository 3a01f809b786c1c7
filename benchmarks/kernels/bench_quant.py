"""Linear layers on int8 and int4 weights: time, bytes of weights per second, products per second.

Weights rotate over copies beyond the caches. Both ceilings, of reading memory and of integer products, are measured in
the same run (ceilings.py). Random data throughout. Run it alone on the machine, or with `--threads 1 --clock thread`.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.kernels.ceilings import CLOCKS, Ceilings
from quire.kernels.native import quant
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import quant as reference

SHAPES = [(896, 896), (9728, 896), (896, 4864), (4096, 4096)]
ROWS = [1, 4, 8, 16, 64, 512]


def huge_tensor(runtime: NativeRuntime, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory on huge pages, never given back."""
    num_elements = int(torch.Size(shape).numel())
    address = runtime.library.map_huge(num_elements * dtype.itemsize)
    buffer = (ctypes.c_char * (num_elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


def median_seconds(call: Callable[[int], object], budget_s: float, clock: str, least: int = 5) -> float:
    """Median time of `call(i)` over about `budget_s` seconds, after one warm-up."""
    now = CLOCKS[clock]
    call(0)
    times: list[float] = []
    end = now() + budget_s
    while len(times) < least or now() < end:
        start = now()
        call(len(times) + 1)
        times.append(now() - start)
    return statistics.median(times)


class Case:
    """One weight in `copies` copies, packed in int8 or int4."""

    def __init__(self, runtime: NativeRuntime, bits: int, size: tuple[int, int], rotated_bytes: int) -> None:
        self.runtime, self.size = runtime, size
        self.format = quant.INT8 if bits == 8 else quant.INT4
        packed_shape = self.format.packed_shape(*size)
        self.weight_bytes = int(torch.Size(packed_shape).numel())
        self.copies = max(1, min(400, rotated_bytes // self.weight_bytes))
        self.packed = huge_tensor(runtime, (self.copies, *packed_shape), quant.PACKED_DTYPE)
        self.scales = torch.zeros(self.format.scales_shape(*size), dtype=self.format.scale_dtype)
        self.rows = torch.randn(size, dtype=torch.bfloat16)
        start = time.perf_counter()
        self.format.pack_rows(runtime, self.rows, self.packed[0], self.scales, 0)
        self.pack_s = time.perf_counter() - start
        for copy in range(1, self.copies):
            self.packed[copy].copy_(self.packed[0])

    def run(self, x: torch.Tensor, copy: int) -> torch.Tensor:
        """The product with one of the copies."""
        return self.format.linear(self.runtime, x, self.packed[copy % self.copies], self.scales, self.size[0])

    def check(self) -> None:
        """The product of a few rows against the dequantised weight in float32."""
        x = torch.randn(3, self.size[1], dtype=torch.bfloat16)
        weight = self.format.unpack_rows(self.runtime, self.packed[0], self.scales, self.size[1], 0, self.size[0])
        q, scales = reference.quantize_int8(x)
        expected = (q * scales[:, None]) @ weight.T
        difference = self.run(x, 0).float() - expected
        assert difference.norm() <= 0.01 * expected.norm(), "wrong result"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4])
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
    print(
        f"{'bits':>4} {'outputs x inputs':>18} {'rows':>5} {'ms':>8} {'GB/s':>6} {'%read':>6} {'GOP/s':>6} {'%rate':>6}"
    )
    figures = []
    for bits in args.bits:
        for size in (SHAPES[index] for index in args.shapes):
            case = Case(runtime, bits, size, args.rotated_mib << 20)
            case.check()
            for num_rows in args.rows:
                x = torch.randn(num_rows, size[1], dtype=torch.bfloat16)
                seconds = median_seconds(lambda i, x=x, case=case: case.run(x, i), args.budget, args.clock)  # type: ignore[misc]
                read, products = case.weight_bytes / seconds, 2 * num_rows * size[0] * size[1] / seconds
                share = f"{100 * products / rate:>6.1f}" if rate else "     -"
                print(
                    f"{bits:>4} {size[0]:>9} x {size[1]:>6} {num_rows:>5} {seconds * 1e3:>8.3f} {read / 1e9:>6.1f} "
                    f"{100 * read / ceiling:>6.1f} {products / 1e9:>6.0f} {share}"
                )
                figures.append({"bits": bits, "size": size, "rows": num_rows, "ms": seconds * 1e3})
            print(
                f"     packed in {case.pack_s * 1e3:.0f} ms ({case.rows.numel() / case.pack_s / 1e6:.0f} M weights/s)"
            )
            runtime.library.unmap_huge(case.packed.data_ptr(), case.packed.numel())
    print(json.dumps({"tier": runtime.tier, "read_gb_s": ceiling / 1e9, "int8_gop_s": rate / 1e9, "runs": figures}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
