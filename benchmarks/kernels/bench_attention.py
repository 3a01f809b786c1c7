"""Paged attention of one layer: decodes against the read rate of memory, prompts against the rate of products.

Both ceilings are measured in the same run, on the same tier and threads (`ceilings.py`). Contexts lie in pages of a
cache larger than the processor's, and every repetition reads other ones. Run alone on the machine, or with one thread
and `--clock thread`. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from itertools import cycle

import torch

from benchmarks.kernels.ceilings import CLOCKS, Ceilings
from quire.kernels.native.attention import paged_attention, unpack_kv_cache
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference.attention import paged_attention as reference_attention

# (num_heads, num_kv_heads, head_size) of Qwen2.5-0.5B, Llama-3.2-1B and Llama-3.1-8B.
LAYOUTS = {"14/2 d64": (14, 2, 64), "32/8 d64": (32, 8, 64), "32/8 d128": (32, 8, 128)}
# Of the cache; queries of caches of eight bits are bfloat16.
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
BLOCK_SIZE = 32


def seconds_of(calls: list[Callable[[], object]], budget_s: float, clock: str) -> tuple[float, float]:
    """Median and quartile spread of a call, the calls taken in turn for `budget_s` seconds."""
    times, turn, end, now = [], cycle(calls), time.perf_counter() + budget_s, CLOCKS[clock]
    next(turn)()
    while time.perf_counter() < end or len(times) < 5:
        call, start = next(turn), now()
        call()
        times.append(now() - start)
    quarters = statistics.quantiles(times, n=4)
    return quarters[1], quarters[2] - quarters[0]


def huge_cache(runtime: NativeRuntime, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal numbers on huge pages, as the engine's cache lies; never unmapped."""
    address = runtime.library.map_huge(num_bytes)
    buffer = (ctypes.c_byte * num_bytes).from_address(address)
    flat = torch.frombuffer(buffer, dtype=dtype)
    period = torch.randn(1 << 16).to(dtype).view(torch.uint8)
    flat.view(torch.uint8).copy_(period.repeat(num_bytes // len(period)))
    return flat


class Case:
    """One shape of step; `calls` are the same step over other pages."""

    def __init__(
        self, runtime: NativeRuntime, flat: torch.Tensor, layout: tuple[int, int, int], batch: list[tuple[int, int]]
    ) -> None:
        num_heads, num_kv_heads, head_size = layout
        page_size = BLOCK_SIZE * head_size
        self.kv_cache = flat[: flat.numel() // (num_kv_heads * 2 * page_size) * (num_kv_heads * 2 * page_size)].view(
            -1, num_kv_heads, 2, page_size
        )
        self.runtime, self.batch, self.head_size = runtime, batch, head_size
        num_pages = [-(-seq_len // BLOCK_SIZE) for _, seq_len in batch]
        order = torch.randperm(len(self.kv_cache)).int()
        self.tables = []
        for start in range(0, len(order) - sum(num_pages) + 1, sum(num_pages)):
            table = torch.zeros(len(batch), max(num_pages), dtype=torch.int32)
            for row, pages in zip(table, order[start : start + sum(num_pages)].split(num_pages), strict=True):
                row[: len(pages)] = pages
            self.tables.append(table)
        self.query = torch.randn(sum(n for n, _ in batch), num_heads, head_size)
        self.query = self.query.to(torch.float32 if flat.dtype == torch.float32 else torch.bfloat16)
        self.starts = torch.tensor([0] + [n for n, _ in batch]).cumsum(0).int()
        self.seq_lens = torch.tensor([n for _, n in batch]).int()
        self.num_bytes = sum(n for _, n in batch) * 2 * num_kv_heads * head_size * flat.element_size()
        seen = sum(seq_len * n - n * (n - 1) // 2 for n, seq_len in batch)
        self.num_flops = 4 * seen * num_heads * head_size

    def run(self, table: torch.Tensor) -> torch.Tensor:
        """The step over the pages of one of `tables`."""
        return paged_attention(
            self.runtime, self.query, self.kv_cache, table, self.starts, self.seq_lens, self.head_size**-0.5
        )

    def check(self) -> None:
        """The first query equals the reference."""
        pages = self.tables[0][0, : -(-self.batch[0][1] // BLOCK_SIZE)].long()
        caches = unpack_kv_cache(self.kv_cache[pages], self.head_size)
        table = torch.arange(len(pages)).unsqueeze(0)
        length = self.batch[0][1] - self.batch[0][0] + 1
        expected = reference_attention(
            self.query[:1].double(), *(cache.double() for cache in caches), table, torch.tensor([0, 1]),
            torch.tensor([length]), self.head_size**-0.5,
        )  # fmt: skip
        worst = (self.run(self.tables[0])[:1].double() - expected).abs().max().item()
        assert worst <= 0.03, f"off by {worst}"


def main() -> int:
    """Run every case and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 2048, 8192], help="of decodes, tokens")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64], help="requests that decode")
    parser.add_argument("--prompts", type=int, nargs="*", default=[256, 1024, 4096], help="tokens")
    parser.add_argument("--cache-mib", type=int, default=512)
    parser.add_argument("--budget-s", type=float, default=0.4, help="for each figure")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="thread: for one thread on a shared machine")
    args = parser.parse_args()
    torch.manual_seed(0)
    runtime = NativeRuntime(args.tier, args.threads)
    ceilings = Ceilings(runtime, args.clock)
    flat = huge_cache(runtime, args.cache_mib << 20, DTYPES[args.dtype])
    figures: dict[str, float | str] = {"tier": runtime.tier, "threads": args.threads, "dtype": args.dtype}
    for name in args.layout or LAYOUTS:
        steps = {f"decode {n} x {ctx}": [(1, ctx)] * n for ctx in args.contexts for n in args.batches}
        steps.update({f"prompt {n}": [(n, n)] for n in args.prompts})
        read_rate = ceilings.measure("read")
        multiply_rate = ceilings.measure("float32")
        if args.dtype != "float32":
            multiply_rate = ceilings.measure("bf16") or multiply_rate
        print(f"{name}: reads at {read_rate / 1e9:.1f} GB/s, multiplies at {multiply_rate / 1e9:.0f} GFLOP/s")
        for step, batch in steps.items():
            case = Case(runtime, flat, LAYOUTS[name], batch)
            if not case.tables:
                print(f"  {step:>18}  needs a larger --cache-mib")
                continue
            case.check()
            calls = [lambda case=case, table=table: case.run(table) for table in case.tables]
            median, spread = seconds_of(calls, args.budget_s, args.clock)
            read, flops = case.num_bytes / median, case.num_flops / median
            ideal = max(read / read_rate, flops / multiply_rate)
            print(
                f"  {step:>18} {median * 1e3:9.3f} ms (spread {spread / median:4.0%})  {read / 1e9:6.1f} GB/s  "
                f"{flops / 1e9:6.1f} GFLOP/s  {ideal:4.0%} of a ceiling"
            )
            figures[f"{name} {step} ms"] = round(median * 1e3, 4)
            figures[f"{name} {step} of ceiling"] = round(ideal, 3)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
