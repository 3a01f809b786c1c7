"""Kernels of one pass over rows (norm, norm of a sum, rotation, gated activation) against copying as many bytes.

    python benchmarks/kernels/bench_elementwise.py --rows 1 64 1024 --threads 2

Each is first checked against its reference. GB/s counts what must be read and written once; percent is of a copy by
torch that reads and writes as much in all, measured in turns with the kernel. Few rows stay in the caches, as they do
between the layers of a model. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.kernels.ceilings import CLOCKS, Ceilings, median_seconds
from quire.kernels.native.attention import rope_and_cache
from quire.kernels.native.elementwise import rms_norm, silu_and_mul
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.reference import activation, norm
from quire.kernels.reference.rotary import rotary_embedding

BF16 = torch.bfloat16
BLOCK_SIZE = 32
MAX_POSITIONS = 4096
EPS = 1e-6


@dataclass
class Model:
    """Sizes of a model."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int = 64


MODELS = {"qwen-0.5b": Model(896, 4864, 14, 2), "llama-1b": Model(2048, 8192, 32, 8)}


@dataclass
class Case:
    """A call, and the bytes that it must read and write."""

    call: Callable[[], object]
    num_bytes: int


def agree(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within two roundings to bfloat16."""
    return torch.allclose(actual.float(), expected.float(), atol=1e-2, rtol=2**-7)


def norm_cases(runtime: NativeRuntime, model: Model, num_rows: int) -> dict[str, Case]:
    """The norm of x, and of x + residual."""
    x, weight = torch.randn(num_rows, model.hidden_size, dtype=BF16), torch.randn(model.hidden_size, dtype=BF16)
    residual, out = torch.randn_like(x), torch.empty_like(x)
    assert agree(rms_norm(runtime, x, weight, EPS), norm.rms_norm(x, weight, EPS)), "wrong result"
    expected, _ = norm.add_rms_norm(x, residual, weight, EPS)
    assert agree(rms_norm(runtime, x, weight, EPS, residual.clone()), expected), "wrong result"
    return {
        "rms_norm": Case(lambda: rms_norm(runtime, x, weight, EPS, out=out), 2 * x.nbytes),
        "add, rms_norm": Case(lambda: rms_norm(runtime, x, weight, EPS, residual, out=out), 4 * x.nbytes),
    }


def rope_case(runtime: NativeRuntime, model: Model, num_rows: int) -> Case:
    """Rotation of queries and keys, and the write of keys and values to pages."""
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_size
    qkv = torch.randn(num_rows, (heads + 2 * kv_heads) * size, dtype=BF16)
    angles = torch.rand(MAX_POSITIONS, size // 2)
    cos, sin = angles.cos(), angles.sin()
    positions, slots = torch.arange(num_rows) % MAX_POSITIONS, torch.arange(num_rows)
    cache = torch.zeros(-(-num_rows // BLOCK_SIZE), kv_heads, 2, BLOCK_SIZE * size, dtype=BF16)

    def call() -> None:
        rope_and_cache(runtime, qkv, heads, kv_heads, size, cos, sin, positions, slots, cache, BLOCK_SIZE)

    query = qkv[:, : heads * size].unflatten(1, (heads, size)).clone()
    call()
    turn = positions.unsqueeze(1)
    expected = rotary_embedding(query, cos[turn], sin[turn])
    assert agree(qkv[:, : heads * size], expected.flatten(1)), "wrong result"
    return Case(call, 2 * qkv.nbytes)


def silu_case(runtime: NativeRuntime, model: Model, num_rows: int) -> Case:
    """silu(gate) * up."""
    x = torch.randn(num_rows, 2 * model.intermediate_size, dtype=BF16)
    out = torch.empty(num_rows, model.intermediate_size, dtype=BF16)
    assert agree(silu_and_mul(runtime, x), activation.silu_and_mul(x)), "wrong result"
    return Case(lambda: silu_and_mul(runtime, x, out=out), x.nbytes + out.nbytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 1024])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="thread: for one thread on a shared machine")
    args = parser.parse_args()
    runtime = NativeRuntime(args.tier, args.threads)
    torch.set_num_threads(args.threads)
    read = Ceilings(runtime, args.clock).measure("read", 3)
    print(f"tier {runtime.tier}, {args.threads} threads: reads {read / 1e9:.1f} GB/s")
    print("model      kernel         rows       us     GB/s  copy GB/s  percent")
    results = []
    for name in args.models:
        for num_rows in args.rows:
            model = MODELS[name]
            cases = norm_cases(runtime, model, num_rows)
            cases["rope, cache"] = rope_case(runtime, model, num_rows)
            cases["silu_and_mul"] = silu_case(runtime, model, num_rows)
            for kernel, case in cases.items():
                source = torch.ones(case.num_bytes // 2, dtype=torch.uint8)
                target = torch.empty_like(source)
                seconds = median_seconds(case.call, args.rounds, clock=args.clock)
                copy = median_seconds(lambda a=target, b=source: a.copy_(b), args.rounds, clock=args.clock)  # type: ignore[misc]
                result = {
                    "model": name, "kernel": kernel, "rows": num_rows, "us": seconds * 1e6,
                    "gb_s": case.num_bytes / seconds / 1e9, "copy_gb_s": case.num_bytes / copy / 1e9,
                }  # fmt: skip
                results.append(result)
                print(
                    f"{name:10s} {kernel:13s} {num_rows:5d} {result['us']:8.1f} {result['gb_s']:8.1f} "
                    f"{result['copy_gb_s']:10.1f} {100 * copy / seconds:8.0f}",
                    flush=True,
                )
    print(json.dumps({"tier": runtime.tier, "threads": args.threads, "read_gb_s": read / 1e9, "results": results}))


if __name__ == "__main__":
    main()
