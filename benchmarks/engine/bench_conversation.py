"""A conversation of several turns: the time to first token of each turn, and that of the same prompt on an empty cache.

The model is one of `benchmarks.checkpoints` with random weights: a hybrid (qwen3.5-0.8b), one of windows (gemma3-1b), a
mixture (olmoe-small). A turn's prompt is the system prompt, all turns and answers before it and the new words. Beside
the times: the tokens that were cached, the largest share of the KV cache (of its pool that is used most) that the turn
held, and the recurrent states that are kept for later turns. Answers are compared. The last line is one JSON object.

    python -m benchmarks.engine.bench_conversation --shape qwen3.5-0.8b
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, write_json
from quire import LLM, SamplingParams
from quire.metrics.records import Gauge

VOCAB_SIZE = 32000


@dataclass
class Turn:
    """Seconds to the first token, tokens of the prompt that were cached, share of the cache at most, and the answer."""

    seconds: float
    num_cached: int
    usage: float
    answer: list[int]


def ask(llm: LLM, prompt: list[int], num_tokens: int) -> Turn:
    """One turn."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    engine = llm.llm_engine
    start, seconds, usage = time.perf_counter(), 0.0, 0.0
    engine.add_request(f"turn {start}", {"prompt_token_ids": prompt}, params)
    while True:
        for output in engine.step():
            if not seconds:
                seconds = time.perf_counter() - start
            if output.finished:
                return Turn(seconds, output.num_cached_tokens or 0, usage, list(output.outputs[0].token_ids))
        if seconds:  # to read the figures takes longer than a small model's step
            usage = max(usage, figure(llm, "vllm:kv_cache_usage_perc"))


def figure(llm: LLM, name: str) -> float:
    """A gauge's value; 0 where it was not made."""
    return sum(metric.value for metric in llm.get_metrics() if isinstance(metric, Gauge) and metric.name == name)


def main() -> None:
    """Run the conversation, each of its prompts on an empty cache as well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-0.8b")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--turn-tokens", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--cache-mib", type=int, default=1024, help="memory of the KV cache, states included")
    args = parser.parse_args()
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(5, VOCAB_SIZE) for _ in range(count)]

    settings = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": args.max_num_seqs, "max_model_len": 4096,
        "kv_cache_memory_bytes": args.cache_mib << 20, "disable_log_stats": False, "speculative_config": "off",
    }  # fmt: skip
    rows, prompt = [], words(args.system_tokens)
    with tempfile.TemporaryDirectory() as directory:
        write_json(Path(directory) / "config.json", {**SHAPES[args.shape].config(), "max_position_embeddings": 4096})
        with LLM(directory, **settings) as warm, LLM(directory, enable_prefix_caching=False, **settings) as cold:
            ask(warm, words(64), 4), ask(cold, words(64), 4)
            for turn in range(args.turns):
                prompt = prompt + words(args.turn_tokens)
                found, expected = (ask(llm, prompt, args.answer_tokens) for llm in (warm, cold))
                assert found.answer == expected.answer, "a cached prefix changed the answer"
                row = {
                    "turn": turn + 1, "tokens": len(prompt), "cached": found.num_cached, "seconds": found.seconds,
                    "cold_seconds": expected.seconds, "share": found.seconds / expected.seconds,
                    "cache_in_use": found.usage, "states": int(figure(warm, "quire:state_checkpoints")),
                    "state_bytes": int(figure(warm, "quire:state_checkpoint_bytes")),
                }  # fmt: skip
                rows.append(row)
                print(described(row), flush=True)
                prompt = prompt + found.answer
    worst = max(row["share"] for row in rows[1:])
    print(json.dumps({"shape": args.shape, "cache_mib": args.cache_mib, "turns": rows, "worst_later_share": worst}))


def described(row: dict[str, Any]) -> str:
    """A turn, on one line."""
    states = f", {row['states']} states of {row['state_bytes'] / 2**20:.0f} MiB kept" if row["states"] else ""
    times = f"{1e3 * row['seconds']:.0f} ms; cold {1e3 * row['cold_seconds']:.0f} ms, {row['share']:.0%}"
    use = f"{row['cache_in_use']:.1%} of the cache in use{states}"
    return f"turn {row['turn']}: {row['tokens']} tokens, {row['cached']} cached, {times}; {use}"


if __name__ == "__main__":
    main()
