"""A long prompt arrives among decoding requests: how long these wait for their tokens while it is computed.

Latencies between tokens (ITL) of the decoding requests: quiet, while the prompt is computed beside them under the
bounds of a server (`max_decode_slowdown`, and `max_inter_token_latency_ms` where given), and without any bound. The
model is a small one with random weights and a long context. The last line is one JSON object.

    python -m benchmarks.engine.bench_long_prompt
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.checkpoints import SHAPES, write_json
from quire import LLM, SamplingParams

VOCAB_SIZE = 32000
NUM_WARM_STEPS = 20


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def write_model(directory: Path, shape: str, max_model_len: int) -> None:
    """A configuration alone: weights are made up, prompts are token ids."""
    config = {**SHAPES[shape].config(), "max_position_embeddings": max_model_len}
    write_json(directory / "config.json", config)


def token_ids(rng: random.Random, count: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [rng.randrange(5, VOCAB_SIZE) for _ in range(count)]}


def measure(model: Path, args: argparse.Namespace, *, slowdown: float, latency_ms: float) -> dict[str, float]:
    """ITL of the decoding requests, in milliseconds, while nothing else runs and while the long prompt is computed."""
    rng = random.Random(0)
    llm = LLM(
        str(model), load_format="dummy", skip_tokenizer_init=True, max_num_seqs=args.decoders + 1,
        max_model_len=args.prompt_len + 4096, max_num_batched_tokens=args.max_num_batched_tokens,
        max_decode_slowdown=slowdown, max_inter_token_latency_ms=latency_ms, enable_prefix_caching=False,
        speculative_config="off",
    )  # fmt: skip
    with llm:
        engine = llm.llm_engine
        endless = SamplingParams(max_tokens=3500, ignore_eos=True, temperature=0.0, detokenize=False)
        for i in range(args.decoders):
            engine.add_request(f"decoder {i}", token_ids(rng, 32), endless)
        while engine.last_stats is None or engine.last_stats.num_scheduled_tokens != args.decoders:
            engine.step()
        for _ in range(NUM_WARM_STEPS):
            engine.step()
        quiet = [step_ms(engine) for _ in range(args.quiet_steps)]
        one = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0, detokenize=False)
        engine.add_request("long", token_ids(rng, args.prompt_len), one)
        beside, start, is_done = [], time.perf_counter(), False
        while not is_done:
            begin = time.perf_counter()
            is_done = any(output.request_id == "long" and output.finished for output in engine.step())
            beside.append(1e3 * (time.perf_counter() - begin))
            assert len(beside) < 3400, "the decoding requests end before the prompt is computed"
        seconds = time.perf_counter() - start
        for i in range(args.decoders):
            engine.discard_requests([f"decoder {i}"])
    return {
        "quiet_p50_ms": percentile(quiet, 50), "quiet_p99_ms": percentile(quiet, 99),
        "beside_p50_ms": percentile(beside, 50), "beside_p99_ms": percentile(beside, 99),
        "ratio": percentile(beside, 99) / percentile(quiet, 99),
        "prompt_ttft_s": seconds, "steps": len(beside),
    }  # fmt: skip


def step_ms(engine: object) -> float:
    """Milliseconds of one step: between two tokens of each request that decodes."""
    start = time.perf_counter()
    engine.step()  # type: ignore[attr-defined]
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-tiny")
    parser.add_argument("--decoders", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, default=16384)
    parser.add_argument("--quiet-steps", type=int, default=300)
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192)
    parser.add_argument("--slowdown", type=float, default=2.0, help="max_decode_slowdown of the bounded run")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="max_inter_token_latency_ms of the bounded run")
    args = parser.parse_args()
    report: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory)
        write_model(model, args.shape, args.prompt_len + 4096)
        for name, slowdown, latency_ms in (("bounded", args.slowdown, args.latency_ms), ("unbounded", 0.0, 0.0)):
            report[name] = measure(model, args, slowdown=slowdown, latency_ms=latency_ms)
            print(f"{name}: { {key: round(value, 2) for key, value in report[name].items()} }", flush=True)
    for name, figures in report.items():
        print(f"{name}: p99 ITL beside the prompt is {figures['ratio']:.2f} times that without")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
