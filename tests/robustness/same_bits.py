"""200 mixed requests give the same bytes in this tree and in another one: `make test-same-bits OTHER=DIR`.

The requests are drawn here and written to a file; each tree's own interpreter generates, in one batch on few KV-cache
blocks (so that requests are preempted and prefixes shared), and what comes out is compared, log-probabilities to the
last bit. The last line is the number of requests that differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WORDS = ("the", "child", "walked", "to", "a", "river", "and", "saw", "seven", "boats", "Name", "is", "7", "+", "12")


def draw_requests(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` of {"prompt", "params"}: of every kind, some with a shared start."""
    rng = random.Random(seed)
    shared = [" ".join(rng.choices(WORDS, k=150)) for _ in range(3)]
    return [{"prompt": _prompt(rng, shared), "params": _params(rng, index)} for index in range(count)]


def _prompt(rng: random.Random, shared: list[str]) -> str:
    start = rng.choice(shared) if rng.random() < 0.3 else ""
    return start + " ".join(rng.choices(WORDS, k=rng.choice((2, 10, 60, 300))))


def _params(rng: random.Random, index: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": rng.choice((1, 8, 40, 120)),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.3)),
    }
    if params["temperature"]:
        params |= {
            "seed": index,
            "top_p": rng.choice((1.0, 0.9)),
            "top_k": rng.choice((0, 20)),
            "min_p": rng.choice((0, 0.05)),
        }
    for name, values in (
        ("presence_penalty", (0.5,)), ("frequency_penalty", (0.3,)), ("repetition_penalty", (1.2,)),
        ("logprobs", (0, 3)),
        ("prompt_logprobs", (1,)), ("stop", (["boat"], ["er", "and"])), ("ignore_eos", (True,)), ("min_tokens", (1,)),
        ("logit_bias", ({"40": 5.0, "41": -100.0},)), ("bad_words", ([" the"],)), ("n", (2, 3)),
    ):  # fmt: skip
        if rng.random() < 0.15:
            params[name] = rng.choice(values)
    if params.get("n", 1) > 1 and not params["temperature"]:
        params["n"] = 1
    if rng.random() < 0.15:
        params["structured_outputs"] = rng.choice((
            {"regex": "[a-z]{3,9} [0-9]{2}"}, {"choice": ["yes", "no", "perhaps"]},
            {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        ))  # fmt: skip
        params.pop("bad_words", None), params.pop("logit_bias", None), params.pop("min_tokens", None)
    return params


def generate(path: Path) -> list[Any]:
    """What the tree of this interpreter makes of the requests in the file."""
    from quire import LLM, SamplingParams
    from quire.core.structured_outputs import StructuredOutputsParams

    requests = json.loads(path.read_text())
    for request in requests:
        params = request["params"]
        if "structured_outputs" in params:
            params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
        if "logit_bias" in params:
            params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    llm = LLM("leaf", num_gpu_blocks_override=220, max_num_seqs=48, max_num_batched_tokens=256)
    outputs = llm.generate(
        [request["prompt"] for request in requests],
        [SamplingParams(**request["params"]) for request in requests],
        use_tqdm=False,
    )
    return [[_plain(output.prompt_logprobs), [_plain_completion(one) for one in output.outputs]] for output in outputs]


def _plain_completion(one: Any) -> list[Any]:
    return [one.text, list(one.token_ids), one.finish_reason, one.stop_reason, _plain(one.logprobs)]


def _plain(logprobs: Any) -> list[Any] | None:
    if logprobs is None:
        return None
    return [
        None if place is None else [[token, value.logprob.hex(), value.rank] for token, value in place.items()]
        for place in logprobs
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--other", type=Path, help="the other tree, with its own .venv")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.requests:
        print(json.dumps(generate(args.requests)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.json"
        path.write_text(json.dumps(draw_requests(args.count, args.seed)))
        ours, theirs = _run(ROOT, path), _run(args.other.resolve(), path)
    differing = [index for index, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    for index in differing[:5]:
        print(f"request {index} differs: {draw_requests(args.count, args.seed)[index]}"[:400])
    print(f"{len(differing)} of {args.count} requests differ")
    return int(bool(differing))


def _run(tree: Path, path: Path) -> list[Any]:
    command = [str(tree / ".venv/bin/python"), __file__, "--requests", str(path)]
    result = subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.stderr[-2000:])
    outputs: list[Any] = json.loads(result.stdout.splitlines()[-1])
    return outputs


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


if __name__ == "__main__":
    sys.exit(main())
