"""Collectives of the shared-memory communicator beside gloo's, in one run: microseconds by size.

python benchmarks/kernels/bench_communicator.py [--ranks 2] [--rounds 300] [--out FILE]

Every rank is a process of one thread. A figure is rank 0's median; ranks begin each call together. The ceiling is one
copy of as many bytes within a rank. "gloo" is torch's own all_reduce and all_gather, not the fixed order of ours.
FILE is an interconnect of `quire plan --interconnect`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import TCPStore

from quire.distributed.shared_memory import SharedMemoryCommunicator, make_region
from quire.kernels.native.runtime import NativeRuntime

SIZES = [64, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22]  # bytes of each rank's tensor


def median_us(call: Callable[[], object], barrier: Callable[[], object], rounds: int) -> float:
    """Of a call after all ranks have met."""
    times = []
    for _ in range(rounds):
        barrier()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times[rounds // 5 :])


def run_rank(rank: int, ranks: int, fd: int, port: int, rounds: int) -> list[dict[str, float]]:
    """Every size, by both."""
    torch.set_num_threads(1)
    own = SharedMemoryCommunicator(NativeRuntime(), fd, rank, ranks)
    store = TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timedelta(seconds=60))
    gloo = distributed.ProcessGroupGloo(store, rank, ranks, timedelta(seconds=60))
    results = []
    for size in SIZES:
        data, expected = torch.full((size // 4,), float(rank + 1)), ranks * (ranks + 1) / 2
        total, parts = data.clone(), [torch.empty_like(data) for _ in range(ranks)]
        own.all_reduce(total)
        assert total.eq(expected).all()
        row, widths, whole = data.view(1, -1), (size // 4,) * ranks, torch.empty(1, ranks * size // 4)
        copy = torch.empty_like(data)
        num = max(20, min(rounds, rounds * (1 << 18) // size))
        zero = torch.zeros_like(data)
        results.append(
            {
                "bytes": size,
                "copy_us": median_us(lambda c=copy, d=data: c.copy_(d), own.barrier, num),
                "all_reduce_us": median_us(lambda z=zero: own.all_reduce(z), own.barrier, num),
                "gloo_all_reduce_us": median_us(lambda z=zero: gloo.allreduce([z]).wait(), own.barrier, num),
                "all_gather_us": median_us(lambda r=row, w=widths, o=whole: own.all_gather(r, w, o), own.barrier, num),
                "gloo_all_gather_us": median_us(
                    lambda p=parts, d=data: gloo.allgather([p], [d]).wait(), own.barrier, num
                ),
            }
        )
    own.barrier()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=None, help="write the JSON line there, too")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank, args.ranks, args.fd, args.port, args.rounds)
        return
    fd = make_region(args.ranks)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    others = [
        subprocess.Popen(
            [sys.executable, __file__, "--ranks", str(args.ranks), "--rounds", str(args.rounds), "--rank", str(rank),
             "--fd", str(fd), "--port", str(port)],
            pass_fds=(fd,),
        )
        for rank in range(1, args.ranks)
    ]  # fmt: skip
    results = run_rank(0, args.ranks, fd, port, args.rounds)
    os.close(fd)
    for other in others:
        other.wait()
    names = list(results[0])
    print("  ".join(f"{name:>18}" for name in names))
    for result in results:
        print("  ".join(f"{result[name]:18.1f}" for name in names))
    small = [one for one in results if one["bytes"] < 1 << 16]
    ratio = min(one[f"gloo_{name}_us"] / one[f"{name}_us"] for one in small for name in ("all_reduce", "all_gather"))
    line = json.dumps({"ranks": args.ranks, "least_gain_below_64_kib": round(ratio, 2), "sizes": results})
    if args.out is not None:
        args.out.write_text(line)
    print(line)


if __name__ == "__main__":
    main()
