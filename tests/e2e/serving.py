"""Streams through an engine whose core is another process, and what they are compared with.

`python -m tests.e2e.serving --count 20` kills the core so often at random moments and compares every stream with
`LLM.generate`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire import LLM
from quire.config.build import build_config
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.async_llm import AsyncLLM
from tests.e2e.tiny_model import write_tiny_model

# Pages are scarce: requests are preempted too.
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 24, "max_num_batched_tokens": 256, "block_size": 16, "num_gpu_blocks_override": 90,
    "num_threads": 1,
}  # fmt: skip


def make_requests(count: int, max_tokens: int) -> list[tuple[Any, SamplingParams]]:
    """Greedy and seeded requests with every parameter that has a memory, some of them with two answers."""
    requests = []
    for i in range(count):
        prompt = {"prompt_token_ids": [(7 * i + j) % 256 for j in range(3 + i % 40)]}
        fields: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": i % 3 != 0, "temperature": 0.0}
        if i % 2:
            fields |= {"temperature": 1.0, "seed": i, "n": 1 + i % 4 // 3}
        if i % 4 == 1:
            fields |= {"top_p": 0.9, "top_k": 50}
        if i % 5 == 2:
            fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
        if i % 7 == 3:
            fields |= {"min_tokens": max_tokens // 2, "stop_token_ids": [10, 20, 30], "bad_words": ["a", "bc"]}
        if i % 6 == 4:
            fields |= {"logprobs": 2, "prompt_logprobs": 1}
        if i % 8 == 5:
            fields |= {"stop": ["\x81", "zz"]}
        requests.append((prompt, SamplingParams(**fields)))
    return requests


def answers_of(output: RequestOutput) -> list[tuple[Any, ...]]:
    """What must not differ."""
    found = []
    for one in output.outputs:
        logprobs = None if one.logprobs is None else [{k: v.logprob for k, v in line.items()} for line in one.logprobs]
        found.append((one.index, one.text, list(one.token_ids), logprobs, one.finish_reason, one.stop_reason))
    lines = output.prompt_logprobs
    return [*found, None if lines is None else [line and {k: v.logprob for k, v in line.items()} for line in lines]]


def expected_answers(model: str, requests: list[tuple[Any, SamplingParams]]) -> list[Any]:
    """The answers of `LLM.generate`."""
    with LLM(model, **SETTINGS) as llm:
        outputs = llm.generate([one for one, _ in requests], [params for _, params in requests], use_tqdm=False)
    return [answers_of(output) for output in outputs]


async def stream(engine: AsyncLLM, request_id: str, prompt: Any, params: SamplingParams) -> list[Any]:
    """One request as a stream of deltas, joined."""
    params = params.clone()
    params.output_kind = RequestOutputKind.DELTA
    whole: RequestOutput | None = None
    async for output in engine.generate(prompt, params, request_id):
        whole = output if whole is None else joined(whole, output)
    assert whole is not None
    return answers_of(whole)


def joined(whole: RequestOutput, new: RequestOutput) -> RequestOutput:
    """`whole` with `new` at its end."""
    by_index = {one.index: one for one in whole.outputs}
    for one in new.outputs:
        before = by_index.get(one.index)
        if before is not None:
            one.text, one.token_ids = before.text + one.text, before.token_ids + one.token_ids
            one.logprobs = None if before.logprobs is None else before.logprobs + (one.logprobs or [])
        by_index[one.index] = one
    new.outputs = [by_index[index] for index in sorted(by_index)]
    new.prompt_logprobs = new.prompt_logprobs or whole.prompt_logprobs
    return new


async def stream_all(engine: AsyncLLM, requests: list[tuple[Any, SamplingParams]], tag: str = "r") -> list[Any]:
    """All requests at once."""
    return await asyncio.gather(*[stream(engine, f"{tag}{i}", *one) for i, one in enumerate(requests)])


def core_of(engine: AsyncLLM) -> int | None:
    """The process of its core."""
    return engine.core_pid


async def kill_at_random(
    engine: AsyncLLM, count: int, rng: random.Random, sign: int, victim: Callable[[AsyncLLM], int | None] = core_of
) -> None:
    """Signal `count` cores, or what `victim` gives of each, some steps after it began to run."""
    first = engine.num_restarts + 1
    for number in range(first, first + count):
        num_steps = rng.randint(1, 25)
        pid, seen = victim(engine), engine.last_stats
        while num_steps:
            await asyncio.sleep(0)
            num_steps -= engine.last_stats is not seen
            seen = engine.last_stats
        assert pid is not None
        os.kill(pid, sign)
        while engine.num_restarts < number:
            await asyncio.sleep(0.01)


async def rounds(
    engine: AsyncLLM,
    requests: Any,
    expected: Any,
    count: int,
    rng: random.Random,
    sign: int = signal.SIGKILL,
    victim: Callable[[AsyncLLM], int | None] = core_of,
) -> int:
    """Stream all requests again and again until `count` cores were signalled; how many answers differed."""
    num_different, number, start = 0, 0, time.monotonic()
    killer = asyncio.ensure_future(kill_at_random(engine, count, rng, sign, victim))
    while not killer.done():
        found = await stream_all(engine, requests, f"{number}-")
        different = sum(one != other for one, other in zip(found, expected, strict=True))
        num_different, number = num_different + different, number + 1
        print(f"round {number}: {different} of {len(found)} differ, {engine.num_restarts} restarts, "
              f"{time.monotonic() - start:.1f} s", flush=True)  # fmt: skip
    await killer
    return num_different


def main() -> None:
    """Kill often, compare everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory:
        model = str(write_tiny_model(Path(directory) / "model", Path(directory) / "marker"))
        requests = make_requests(args.requests, 80)
        expected = expected_answers(model, requests)
        engine = AsyncLLM.from_config(build_config(model=model, **SETTINGS))
        num_different = asyncio.run(rounds(engine, requests, expected, args.count, rng))
        engine.shutdown()
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main()
