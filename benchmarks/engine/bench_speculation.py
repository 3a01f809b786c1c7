"""Is speculation ever slower than plain decoding, and what does it give? A sweep over loads, kinds of text and formats.

    python benchmarks/checkpoints.py qwen-0.5b
    python -m benchmarks.engine.bench_speculation --quick
    python -m benchmarks.engine.bench_speculation --targets qwen-0.5b --formats int8 --concurrency 1,16
    python -m benchmarks.engine.bench_speculation --step-cost --against ../before

A cell is a target, a format of weights, a number of requests at once and a kind of text (`benchmarks/texts.py`). Two
engines of one process, plain and speculating, run the same fresh requests in turn, and a cell's figure is the median of
plain seconds over speculating seconds; prompts are in the prefix cache, so that decoding is what is timed. Random
weights do not write texts, so a logits processor raises the logit of the token that is next in a given text, in both
engines: the model and the sampler do all their work, and what is decoded is a text of its kind. Kind "own" is what the
model writes by itself, greedily. A method is one of `speculative_config`, or `oracle:0.7`: drafts from the given text,
each right with that probability, so that the controller is measured alone. Token ids of both engines must be equal.
The worst cell is printed last; the last line is one JSON object.

`--step-cost` compares schedule and update, and whole steps of `leaf`, of this tree with those of another one, in turn,
with nothing configured (`benchmarks/engine/step_cost.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import workload
from benchmarks.engine.step_cost import compare_trees
from benchmarks.texts import KINDS, prose
from quire import LLM, SamplingParams
from quire.core.drafts import DraftRows, Proposals, make_proposals
from quire.core.engine_messages import EngineCoreRequest
from quire.core.sampling_params import RequestOutputKind
from quire.engine import core_factory
from quire.sample.logits_processor import LogitsProcessor
from quire.sample.logits_processor.interface import RowRequest
from quire.scheduler.setup import SchedulerSetup
from quire.spec_decode.controller import SpeculationController

OWN = "own"
FORMATS = {"bf16": None, "int8": "int8", "int4": "int4"}
HUGE_LOGIT = 1e9
MAX_LEN = 1024
QUICK = {"targets": "leaf", "formats": "bf16", "concurrency": "1,16", "rounds": 3, "output_len": 256}


class GivenText(LogitsProcessor):
    """Requests with extra_args={"given_text": [ids]} get these ids, whatever the model thinks."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self._texts = np.zeros((max_num_seqs, MAX_LEN), dtype=np.int64)
        self._places = np.zeros(max_num_seqs, dtype=np.int64)

    def is_argmax_invariant(self) -> bool:
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        text = (request.params.extra_args or {}).get("given_text")
        if text is None:
            return False
        self._texts[row, : len(text)] = text
        self._places[row] = len(request.output_token_ids)
        return True

    def remove_row(self, row: int) -> None:
        self._places[row] = 0

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        self._places[rows] += 1

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        logits[torch.arange(len(rows)), torch.from_numpy(self._texts[rows, self._places[rows]])] = HUGE_LOGIT
        return logits


class Oracle:
    """A `DraftProposer` that has read the given texts; each of its drafts is wrong with a given probability."""

    name = "oracle"

    def __init__(self, chance: float) -> None:
        self._chance = chance
        self._rng = np.random.default_rng(0)
        self._texts: dict[int, tuple[int, np.ndarray]] = {}

    def begin(self, request: EngineCoreRequest) -> None:
        text = (request.sampling_params.extra_args or {}).get("given_text", ())
        self._texts[request.handle] = len(request.prompt_token_ids), np.array(text, dtype=np.int32)

    def propose(self, rows: DraftRows) -> Proposals:
        drafts = []
        for handle, num_tokens, most in zip(rows.handles, rows.num_tokens, rows.max_tokens, strict=True):
            num_prompt, text = self._texts[int(handle)]
            right = text[num_tokens - num_prompt :][:most]
            drafts.append(right + (self._rng.random(len(right)) >= self._chance).astype(np.int32))
        return make_proposals(drafts, self._chance)

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        del self._texts[handle]


@contextmanager
def proposing(method: str) -> Iterator[None]:
    """Engines that are made meanwhile draft by this oracle, if it is one, under a controller."""
    make = core_factory.make_scheduler
    if method.startswith("oracle:"):

        def make_drafting(setup: SchedulerSetup, **options: Any) -> Any:
            proposer = Oracle(float(method.removeprefix("oracle:")))
            drafting = dataclasses.replace(setup, has_proposer=True)
            return make(drafting, proposer=proposer, controller=SpeculationController(), **options)

        core_factory.make_scheduler = make_drafting  # type: ignore[assignment]
    try:
        yield
    finally:
        core_factory.make_scheduler = make


@dataclass(frozen=True, slots=True)
class Cell:
    """One load."""

    target: str
    format: str
    method: str
    kind: str
    num_reqs: int

    def __str__(self) -> str:
        return f"{self.target:10} {self.format:4} {self.method:10} {self.kind:16} x{self.num_reqs:<3}"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the text that is to follow; None = what the model writes."""

    prompt: list[int]
    text: list[int] | None


def make_requests(llm: LLM, cell: Cell, args: argparse.Namespace, rng: random.Random) -> list[Request]:
    """Fresh requests of a cell."""
    tokenizer, output_len = llm.get_tokenizer(), args.output_len
    requests = []
    for _ in range(cell.num_reqs):
        size = 4 * output_len  # characters: more than enough tokens
        text = []
        while len(text) < output_len:
            prompt_text, follows = (prose if cell.kind == OWN else KINDS[cell.kind])(rng, size)
            prompt, text = tokenizer.encode(prompt_text), tokenizer.encode(follows)
            size *= 2
        prompt = prompt[-(MAX_LEN - output_len - 1) :]
        requests.append(Request(prompt, None if cell.kind == OWN else text[:output_len]))
    return requests


def run(llm: LLM, requests: list[Request], output_len: int) -> tuple[float, int, list[list[int]]]:
    """(seconds, steps, token ids of each request) of requests that come together."""
    engine, found, start = llm.llm_engine, dict[str, list[int]](), time.perf_counter()
    for number, request in enumerate(requests):
        params = SamplingParams(
            temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=None if request.text is None else {"given_text": request.text},
        )  # fmt: skip
        engine.add_request(f"{number}", {"prompt_token_ids": request.prompt}, params)
    num_steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        num_steps += 1
    return time.perf_counter() - start, num_steps, [found[f"{number}"] for number in range(len(requests))]


def run_cell(cell: Cell, arms: dict[str, LLM], args: argparse.Namespace) -> dict[str, Any]:
    """The cell's figures: medians over rounds in turns; the first round warms up."""
    rng, ratios, tokens_per_step, rates = random.Random(f"{cell}"), [], [], []
    for number in range(args.rounds + 1):
        requests = make_requests(arms["plain"], cell, args, rng)
        seconds: dict[str, float] = {}
        num_steps: dict[str, int] = {}
        answers = {}
        for name in ("plain", "speculating") if number % 2 else ("speculating", "plain"):
            run(arms[name], requests, 1)  # prompts into the prefix cache
            seconds[name], num_steps[name], answers[name] = run(arms[name], requests, args.output_len)
        assert answers["plain"] == answers["speculating"], f"{cell}: drafts changed an answer"
        if number:
            ratios.append(seconds["plain"] / seconds["speculating"])
            tokens_per_step.append(args.output_len / num_steps["speculating"])
            rates.append(cell.num_reqs * args.output_len / seconds["plain"])
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_tokens_per_s": statistics.median(rates),
        "tokens_per_step": statistics.median(tokens_per_step),
    }


def make_llm(target: str, args: argparse.Namespace, weights: str, num_seqs: int, speculative: Any) -> LLM:
    """One engine."""
    model = target if target == "leaf" else str(args.checkpoints / target)
    settings = {"quantization": FORMATS[weights], "num_threads": args.num_threads}
    given = {name: value for name, value in settings.items() if value is not None}
    return LLM(
        model, max_model_len=MAX_LEN, max_num_seqs=num_seqs, logits_processors=[GivenText],
        kv_cache_memory_bytes=int(args.kv_cache_gib * 2**30), speculative_config=speculative, **given,
    )  # fmt: skip


def sweep(args: argparse.Namespace) -> dict[Cell, dict[str, Any]]:
    """All cells, each printed when it is done."""
    sizes = [int(size) for size in args.concurrency.split(",")]
    kinds = [*KINDS, OWN] if args.kinds == "all" else args.kinds.split(",")
    results = {}
    for target in args.targets.split(","):
        for weights in args.formats.split(","):
            for method in args.methods.split(","):
                is_oracle = method.startswith("oracle:")
                arms = {"plain": make_llm(target, args, weights, max(sizes), "off")}
                with proposing(method):
                    config = "off" if is_oracle else {"method": method.split("+")}
                    arms["speculating"] = make_llm(target, args, weights, max(sizes), config)
                for kind in kinds:
                    if kind == OWN and (target != "leaf" or is_oracle):
                        continue  # random weights write nothing, and an oracle knows given texts
                    for num_reqs in sizes:
                        cell = Cell(target, weights, method, kind, num_reqs)
                        results[cell] = run_cell(cell, arms, args)
                        print_cell(cell, results[cell])
                for llm in arms.values():
                    llm.shutdown()
    return results


def print_cell(cell: Cell, figures: dict[str, Any]) -> None:
    """One line."""
    rounds = " ".join(f"{ratio:.3f}" for ratio in figures["ratios"])
    per_step, rate = figures["tokens_per_step"], figures["plain_tokens_per_s"]
    print(
        f"{cell} {figures['ratio']:6.3f} ({rounds}), {per_step:.2f} tokens a step, plain {rate:.0f} tokens/s",
        flush=True,
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="leaf,qwen-0.5b", help="leaf, or names of benchmarks/checkpoints.py")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/checkpoints"))
    parser.add_argument("--formats", default="bf16,int8,int4")
    parser.add_argument("--methods", default="suffix", help="suffix, suffix+draft_model, oracle:0.7, ...")
    parser.add_argument("--kinds", default="all", help=f"of {', '.join(KINDS)}, {OWN}")
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--kv-cache-gib", type=float, default=0.75)
    parser.add_argument("--quick", action="store_true", help=f"as {QUICK}")
    parser.add_argument("--step-cost", action="store_true", help="compare steps without drafts with another tree's")
    parser.add_argument("--against", type=Path, help="that tree: a checkout with its native library built")
    args = parser.parse_args()
    if args.quick:
        vars(args).update(QUICK)
    if args.step_cost and args.against is None:
        parser.error("--step-cost needs --against")
    return args


def main() -> int:
    args = parse_args()
    if args.step_cost:
        return compare_trees(args.against, args.rounds)
    results = sweep(args)
    print("\nfrom the best cell to the worst:")
    ordered = sorted(results.items(), key=lambda item: -item[1]["ratio"])
    for cell, figures in ordered:
        print_cell(cell, figures)
    cells = [{"cell": " ".join(str(cell).split()), **figures} for cell, figures in ordered]
    workload.print_json({"worst": ordered[-1][1]["ratio"], "cells": cells})
    return 0


if __name__ == "__main__":
    sys.exit(main())
