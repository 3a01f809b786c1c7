"""What proposers that draft from history cost a step: 256 requests with 2,000 tokens each, and a full store of answers.

    python -m benchmarks.engine.bench_proposers

In each step every request has got 1 to 4 tokens and asks for 8 drafts. Texts are drawn from 128,000 tokens by Zipf's
law, and a third of them repeats what came before. Prints per proposer the time of a step, what a prompt costs until it
is indexed, the longest step while a prompt of 100,000 tokens is, and memory. The last line is the figure: milliseconds
of a step of "suffix, else ngram" (the median).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.core.drafts import DraftProposer, DraftRows
from quire.core.engine_messages import EngineCoreRequest
from quire.core.sampling_params import SamplingParams
from quire.spec_decode.chained import ChainedProposer
from quire.spec_decode.ngram import NgramProposer
from quire.spec_decode.suffix import SuffixProposer

VOCAB_SIZE = 128_000
MAX_TOKENS = 8
NUM_TENANTS = 8
ANSWER_LEN = 500


@dataclass
class Load:
    """Requests that decode in steps of 1 to 4 tokens each."""

    num_requests: int
    history: int
    rng: np.random.Generator

    def texts(self, num_steps: int) -> np.ndarray:
        """[num_requests, all tokens]"""
        return np.stack([text(self.rng, self.history + 4 * num_steps) for _ in range(self.num_requests)])

    def steps(self, token_ids: np.ndarray, num_steps: int) -> Iterator[DraftRows]:
        """What is asked in each step."""
        num_tokens = np.full(self.num_requests, self.history, dtype=np.int32)
        rows = np.arange(self.num_requests, dtype=np.intp)
        max_tokens = np.full(self.num_requests, MAX_TOKENS, dtype=np.int32)
        for _ in range(num_steps):
            num_tokens = num_tokens + self.rng.integers(1, 5, self.num_requests, dtype=np.int32)
            yield DraftRows(rows, rows.astype(np.int64), num_tokens, max_tokens, token_ids)


def text(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """[num_tokens] int32; spans of 5 to 60 tokens, a third of them copies of earlier ones."""
    spans: list[np.ndarray] = []
    made = np.empty(0, dtype=np.int32)
    length = 0
    while length < num_tokens:
        span = (rng.zipf(1.2, int(rng.integers(5, 60))) % VOCAB_SIZE).astype(np.int32)
        if length > 100 and rng.random() < 1 / 3:
            made = np.concatenate([made, *spans])
            spans.clear()
            start = int(rng.integers(0, len(made)))
            span = made[start : start + len(span)]
        spans.append(span)
        length += len(span)
    return np.concatenate([made, *spans])[:num_tokens]


def request(handle: int, prompt: np.ndarray) -> EngineCoreRequest:
    """Of one of a few tenants in turn."""
    tenant = f"tenant {handle % NUM_TENANTS}"
    return EngineCoreRequest(
        handle=handle, request_id=str(handle), prompt_token_ids=prompt, sampling_params=SamplingParams(), seed=0,
        tenant=tenant,
    )  # fmt: skip


def fill_store(proposer: DraftProposer, rng: np.random.Generator, num_answers: int) -> None:
    """Answers of all tenants, indexed."""
    handles = range(1 << 40, (1 << 40) + num_answers)
    for handle in handles:
        answer = text(rng, ANSWER_LEN)
        proposer.begin(request(handle, answer[:1]))
        proposer.end(handle, answer, 0)
    one = np.zeros(1, dtype=np.int32)
    for handle in range(handles.stop, handles.stop + NUM_TENANTS):
        proposer.begin(request(handle, one))
        at = DraftRows(
            np.zeros(1, np.intp),
            np.array([handle]),
            np.ones(1, np.int32),
            np.ones(1, np.int32),
            np.zeros((1, 8), np.int32),
        )
        for _ in range(num_answers * ANSWER_LEN // NUM_TENANTS // 2048 + 2):
            proposer.propose(at)
        proposer.end(handle, one, 1)


def timed(proposer: DraftProposer, rows: DraftRows) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    proposer.propose(rows)
    return (time.perf_counter() - start) * 1e3


def measure(name: str, proposer: DraftProposer, load: Load, num_steps: int) -> float:
    """Median milliseconds of a step in which every text is indexed but for its newest tokens."""
    token_ids = load.texts(num_steps + 1)
    for row in range(load.num_requests):
        proposer.begin(request(row, token_ids[row, : load.history]))
    asked = load.steps(token_ids, num_steps)
    first = next(asked)
    num_first = 0
    first_ms = [timed(proposer, first)]
    while num_first < load.num_requests * load.history // 2048 + 1:
        first_ms.append(timed(proposer, first))
        num_first += 1
    num_drafts, step_ms = 0, []
    for rows in asked:
        step_ms.append(timed(proposer, rows))
        num_drafts += len(proposer.propose(rows).token_ids)
    step_ms.sort()
    median = statistics.median(step_ms)
    print(
        f"{name:14} {median:.3f} ms a step (p99 {step_ms[int(len(step_ms) * 0.99)]:.3f}), "
        f"{num_drafts / len(step_ms) / load.num_requests:.1f} drafts a row; indexing: {len(first_ms)} steps of at most "
        f"{max(first_ms):.3f} ms, {sum(first_ms) * 1e3 / load.num_requests / load.history:.3f} us a token"
    )
    return median


def measure_long_prompt(proposer: DraftProposer, rng: np.random.Generator, num_tokens: int) -> None:
    """What a long prompt adds to steps until it is indexed."""
    token_ids = text(rng, num_tokens)[None]
    handle = 1 << 50
    proposer.begin(request(handle, token_ids[0]))
    rows = DraftRows(
        np.zeros(1, np.intp), np.array([handle]), np.array([num_tokens], np.int32), np.full(1, 8, np.int32), token_ids
    )
    step_ms = [timed(proposer, rows) for _ in range(num_tokens // 2048 + 1)]
    print(
        f"a prompt of {num_tokens:,} tokens: {len(step_ms)} steps of at most {max(step_ms):.3f} ms, "
        f"{sum(step_ms):.1f} ms"
    )


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--history", type=int, default=2000, help="tokens of each request before the first step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--answers", type=int, default=1200, help="past answers of 500 tokens in the store")
    parser.add_argument("--long-prompt", type=int, default=100_000)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    load = Load(args.requests, args.history, rng)
    measure("ngram", NgramProposer(MAX_TOKENS), load, args.steps)
    suffix = SuffixProposer(MAX_TOKENS)
    fill_store(suffix, rng, args.answers)
    measure("suffix", suffix, load, args.steps)
    stats = suffix.stats()
    print(
        f"suffix memory: {stats.num_request_bytes / stats.num_requests / 1024:.0f} KiB a request; store: "
        f"{stats.num_store_answers} answers in {stats.num_store_bytes / 2**20:.1f} MiB, "
        f"{stats.num_store_evictions} evicted"
    )
    measure_long_prompt(suffix, rng, args.long_prompt)
    filled = SuffixProposer(MAX_TOKENS)
    fill_store(filled, rng, args.answers)
    figure = measure(
        "suffix,ngram", ChainedProposer(filled, NgramProposer(MAX_TOKENS, histories=filled.histories)), load, args.steps
    )
    print(f"{figure:.3f}")


if __name__ == "__main__":
    main()
