"""A conversation of several turns: the time to first token of each turn, and that of the same prompt on an empty cache.

The model is one of `benchmarks.checkpoints` with random weights. A turn's prompt is the system prompt, all turns and
answers before it and the new words. The tokens that were cached stand beside the times, and answers are compared. The
last line is one JSON object.

    python -m benchmarks.engine.bench_conversation --shape qwen3.5-0.8b
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoints import SHAPES, write_json
from quire import LLM, SamplingParams

VOCAB_SIZE = 32000


def first_token_s(llm: LLM, prompt: list[int], num_tokens: int) -> tuple[float, int, list[int]]:
    """Seconds to the first token of an answer, tokens of the prompt that were cached, and the answer."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    engine = llm.llm_engine
    start, seconds = time.perf_counter(), 0.0
    engine.add_request(f"turn {start}", {"prompt_token_ids": prompt}, params)
    while True:
        for output in engine.step():
            if not seconds:
                seconds = time.perf_counter() - start
            if output.finished:
                return seconds, output.num_cached_tokens or 0, list(output.outputs[0].token_ids)


def main() -> None:
    """Run the conversation, then each of its prompts on an empty cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3.5-0.8b")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--turn-tokens", type=int, default=60)
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    args = parser.parse_args()
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(5, VOCAB_SIZE) for _ in range(count)]

    settings = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_num_seqs": args.max_num_seqs, "max_model_len": 4096,
    }  # fmt: skip
    rows, prompt = [], words(args.system_tokens)
    with tempfile.TemporaryDirectory() as directory:
        write_json(Path(directory) / "config.json", {**SHAPES[args.shape].config(), "max_position_embeddings": 4096})
        with LLM(directory, **settings) as warm, LLM(directory, enable_prefix_caching=False, **settings) as cold:
            first_token_s(warm, words(64), 4), first_token_s(cold, words(64), 4)
            for turn in range(args.turns):
                prompt = prompt + words(args.turn_tokens)
                seconds, num_cached, answer = first_token_s(warm, prompt, args.answer_tokens)
                cold_s, _, cold_answer = first_token_s(cold, prompt, args.answer_tokens)
                rows.append({"turn": turn + 1, "tokens": len(prompt), "cached": num_cached, "seconds": seconds,
                             "cold_seconds": cold_s, "share": seconds / cold_s})  # fmt: skip
                assert answer == cold_answer, "a cached prefix changed the answer"
                print(f"turn {turn + 1}: {len(prompt)} tokens, {num_cached} cached, {1e3 * seconds:.0f} ms; "
                      f"cold {1e3 * cold_s:.0f} ms, {seconds / cold_s:.0%}", flush=True)  # fmt: skip
                prompt = prompt + answer
    print(json.dumps({"shape": args.shape, "turns": rows, "worst_later_share": max(row["share"] for row in rows[1:])}))


if __name__ == "__main__":
    main()
