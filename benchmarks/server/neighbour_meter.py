"""The neighbour of `bench_neighbours`: one stream of tokens and short chats, timed. Prints one JSON object.

python -m benchmarks.server.neighbour_meter PORT SECONDS
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import numpy as np

from benchmarks.server.neighbour_attacks import open_request

PAUSE_S = 0.1
KEY = "key-of-bob"


async def read_tokens(port: int, gaps: list[float], deadline: float) -> None:
    """Streams, one after another, without the time to each first token."""
    body = {"prompt": [7] * 16, "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}
    while time.perf_counter() < deadline:
        reader, writer = await open_request(port, "/v1/completions", body, KEY)
        last = 0.0
        while (line := await reader.readline()) and time.perf_counter() < deadline:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    gaps.append(now - last)
                last = now
        writer.close()


async def chat(port: int, times: list[float], deadline: float) -> None:
    """Chats of one token."""
    number = 0
    while time.perf_counter() < deadline:
        number += 1
        body: dict[str, Any] = {"messages": [{"role": "user", "content": f"Hello {number}"}], "max_tokens": 1}
        start = time.perf_counter()
        reader, writer = await open_request(port, "/v1/chat/completions", body, KEY)
        answer = await reader.read()
        assert b" 200 " in answer[:20], answer
        times.append(time.perf_counter() - start)
        writer.close()
        await asyncio.sleep(PAUSE_S)


async def measure(port: int, seconds: float) -> dict[str, Any]:
    gaps: list[float] = []
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    await asyncio.gather(read_tokens(port, gaps, deadline), chat(port, times, deadline))
    p50, p99, most = 1e3 * np.percentile(gaps, [50, 99, 100])
    chats = 1e3 * np.percentile(times, [50, 100])
    return {
        "itl_p50_ms": p50, "itl_p99_ms": p99, "itl_max_ms": most, "num_tokens": len(gaps),
        "chat_p50_ms": chats[0], "chat_max_ms": chats[1], "num_chats": len(times),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1]), float(sys.argv[2])))))
