"""Is speculation ever slower than plain decoding, and what does it give? A sweep over loads, kinds of text and formats.

    python benchmarks/checkpoints.py qwen-0.5b
    python -m benchmarks.engine.bench_speculation --targets leaf --results build/leaf.jsonl
    python -m benchmarks.engine.bench_speculation --targets qwen-0.5b --concurrency 1,4,16 --cell-seconds 20
    python -m benchmarks.engine.bench_speculation --targets leaf --kinds stories --methods eagle --concurrency 1
    python -m benchmarks.engine.bench_speculation --step-cost --against ../before

A cell is a target, a format of weights, a number of requests at once and a kind of text (`benchmarks/texts.py`). Three
engines of one process, one speculating and two plain, answer the same fresh requests for `--cell-seconds`, in turns of
some steps; a cell's figure is the mean of all plain seconds over all speculating seconds, so trials that lose and are
rare count. Beside it stand its standard error, from the rounds, and the two plain engines' seconds over each other: how
far figures go apart by chance. Prompts are in the prefix cache, so that decoding is what is timed. Kind "stories" is
what the model writes by itself, greedily, up to where it ends; all other texts are given (`given_texts`). Method
"default" is what an engine does with no setting; others are those of `speculative_config`, and `oracle:0.7`: drafts
from the given text, each right with that probability, so that the controller is measured alone. Token ids of all
engines must be equal.

With `--results FILE` each cell is added to a file when it is done, and those that are in it are not run again. The last
lines are a table for docs/LOG.md, how many cells are certainly under BAR (by two standard errors), and the worst
cell's figure.

`--step-cost` compares schedule and update, and whole steps of `leaf`, of this tree with those of another one, in turn,
with nothing configured (`benchmarks/engine/step_cost.py`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.given_texts import give_texts, proposing, writing_given_texts
from benchmarks.engine.step_cost import compare_trees
from benchmarks.texts import KINDS, story_prompt
from quire import LLM, SamplingParams
from quire.core.sampling_params import RequestOutputKind

Clock = Callable[[], float]
STORIES = "stories"
FORMATS = {"bf16": None, "int8": "int8", "int4": "int4"}
MAX_LEN = 1024
# Tokens of an answer by requests at once, of a small model; of others a half or a quarter of it.
OUTPUT_LENS = {1: 256, 4: 256, 16: 192, 64: 128}
MIN_ROUNDS = 2
# Engines take turns of so many seconds, so that a machine whose speed drifts is the same one for both; and of so many
# steps at least, as an engine counts what goes between its own steps.
TURN_S, TURN_STEPS = 0.03, 8
DONE = object()
ARMS = ("plain", "speculating", "again")  # the last one is plain, too
BAR = 0.98
DEFAULT = "default"
# A story of `leaf` has some 60 tokens: a round has several, one after the other.
STORIES_IN_TURN = 4


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

    @property
    def output_len(self) -> int:
        """Tokens of an answer."""
        known = OUTPUT_LENS[max(size for size in OUTPUT_LENS if size <= self.num_reqs)]
        if self.target == "leaf":
            return known
        return known // (2 if self.num_reqs == 1 else 4)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and the text that is to follow; None = what the model writes."""

    prompt: list[int]
    text: list[int] | None


@dataclass(slots=True)
class Figures:
    """What was measured of a cell, in rounds.

    Attributes:
        plain_s, speculating_s, again_s: of each round, by the engines of ARMS.
        num_tokens, num_steps: of all rounds; tokens of one of the requests at once, steps of the speculating engine.
    """

    plain_s: list[float] = dataclasses.field(default_factory=list)
    speculating_s: list[float] = dataclasses.field(default_factory=list)
    again_s: list[float] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0

    @property
    def ratio(self) -> float:
        """Plain seconds over speculating seconds, of all rounds together."""
        return statistics.mean((sum(self.plain_s), sum(self.again_s))) / sum(self.speculating_s)

    @property
    def error(self) -> float:
        """Standard error of `ratio`, from how far single rounds are from it."""
        rounds = zip(self.plain_s, self.again_s, self.speculating_s, strict=True)
        squares = sum((statistics.mean((plain, again)) - self.ratio * own) ** 2 for plain, again, own in rounds)
        count = len(self.plain_s)
        return math.sqrt(squares * count / (count - 1)) / sum(self.speculating_s)

    @property
    def chance(self) -> float:
        """What plain decoding came to, compared with itself."""
        return sum(self.plain_s) / sum(self.again_s)

    @property
    def is_slower(self) -> bool:
        """Whether drafts were certainly slower than BAR allows."""
        return self.ratio + 2.0 * self.error < BAR


def make_requests(llm: LLM, cell: Cell, rng: random.Random) -> list[Request]:
    """Fresh requests of a cell."""
    tokenizer, output_len = llm.get_tokenizer(), cell.output_len
    requests = []
    for _ in range(cell.num_reqs):
        if cell.kind == STORIES:
            messages = [{"role": "user", "content": story_prompt(rng)}]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            requests.append(Request(prompt, None))
            continue
        size, prompt, text = 4 * output_len, list[int](), list[int]()  # characters: more than enough tokens
        # Another one where it is too long: a prompt that is cut is not what the answer is about.
        while len(text) < output_len or len(prompt) >= MAX_LEN - output_len:
            prompt_text, follows = KINDS[cell.kind](rng, size)
            prompt, text = tokenizer.encode(prompt_text), tokenizer.encode(follows)
            size = 2 * size if len(text) < output_len else 3 * size // 4
        requests.append(Request(prompt, text[:output_len]))
    return requests


@dataclass(slots=True)
class Answers:
    """What an engine answered.

    Attributes:
        token_ids: of each request.
        num_steps, seconds: that they took.
    """

    token_ids: list[list[int]] = dataclasses.field(default_factory=list)
    num_steps: int = 0
    seconds: float = 0.0


def answer(llm: LLM, groups: list[list[Request]], output_len: int, answers: Answers) -> Iterator[None]:
    """Answer one group of requests after another, step by step. A given text is written whole."""
    engine = llm.llm_engine
    for requests in groups:
        found = dict[str, list[int]]()
        for number, request in enumerate(requests):
            params = SamplingParams(
                temperature=0, max_tokens=output_len, ignore_eos=request.text is not None, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            engine.add_request(f"{number}", {"prompt_token_ids": request.prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = list(output.outputs[0].token_ids)
            answers.num_steps += 1
            yield
        answers.token_ids += [found[f"{number}"] for number in range(len(requests))]


def answer_in_turns(arms: Sequence[LLM], groups: list[list[Request]], output_len: int, clock: Clock) -> list[Answers]:
    """Answer all groups, one after the other, by each engine, in turns."""
    all_answers = [Answers() for _ in arms]
    under_way = [
        (answer(llm, groups, output_len, answers), answers) for llm, answers in zip(arms, all_answers, strict=True)
    ]
    while under_way:
        for steps, answers in list(under_way):
            start = now = clock()
            num_before = answers.num_steps
            while now - start < TURN_S or answers.num_steps - num_before < TURN_STEPS:
                if next(steps, DONE) is DONE:
                    under_way.remove((steps, answers))
                    break
                now = clock()
            answers.seconds += clock() - start
    return all_answers


def run_cell(cell: Cell, arms: dict[str, LLM], cell_seconds: float, clock: Clock) -> Figures:
    """The cell's figures, of rounds in turns; the first round warms up."""
    rng, figures, number = random.Random(f"{cell}"), Figures(), 0
    num_in_turn = STORIES_IN_TURN if cell.kind == STORIES else 1
    end = time.perf_counter() + cell_seconds
    while time.perf_counter() < end or len(figures.plain_s) < MIN_ROUNDS:
        groups = [make_requests(arms["plain"], cell, rng) for _ in range(num_in_turn)]
        given = [(one.prompt, one.text) for group in groups for one in group if one.text is not None]
        give_texts(given)
        first = number % len(ARMS)
        names = ARMS[first:] + ARMS[:first]
        engines = [arms[name] for name in names]
        answer_in_turns(engines, groups, 1, clock)  # prompts into the prefix cache
        answers = dict(zip(names, answer_in_turns(engines, groups, cell.output_len, clock), strict=True))
        plain, speculating, again = (answers[name] for name in ARMS)
        assert plain.token_ids == speculating.token_ids, f"{cell}: drafts changed an answer"
        if number:
            figures.plain_s.append(plain.seconds)
            figures.speculating_s.append(speculating.seconds)
            figures.again_s.append(again.seconds)
            figures.num_tokens += sum(map(len, plain.token_ids)) // cell.num_reqs
            figures.num_steps += speculating.num_steps
        number += 1
    return figures


def make_arms(cell: Cell, args: argparse.Namespace) -> dict[str, LLM]:
    """The engines for cells of this target, format and method."""
    model = cell.target if cell.target == "leaf" else str(args.checkpoints / cell.target)
    settings = {"quantization": FORMATS[cell.format], "num_threads": args.num_threads}
    given = {name: value for name, value in settings.items() if value is not None}
    drafting: Any = {"method": cell.method.split("+"), "enable_adaptive_verification": not args.always}
    if cell.method.startswith("oracle:"):
        drafting = "off"
    if cell.method == DEFAULT:
        drafting = None
    if args.heads is not None:
        drafting = {**drafting, "model": str(args.heads)} if isinstance(drafting, dict) else drafting
    if args.tree is not None:
        drafting = {**drafting, "speculative_token_tree": args.tree} if isinstance(drafting, dict) else drafting

    def make(speculative: Any) -> LLM:
        return LLM(
            model, max_model_len=MAX_LEN, max_num_seqs=max(args.concurrency),
            kv_cache_memory_bytes=int(args.kv_cache_gib * 2**30), speculative_config=speculative, **given,
        )  # fmt: skip

    arms = {"plain": make("off"), "again": make("off")}
    with proposing(cell.method):
        arms["speculating"] = make(drafting)
    return arms


def cells_of(args: argparse.Namespace) -> list[list[Cell]]:
    """The cells of each pair of engines."""
    return [
        [
            Cell(target, weights, method, kind, num_reqs)
            for kind in args.kinds
            for num_reqs in args.concurrency
            if kind != STORIES or (target == "leaf" and not method.startswith("oracle:"))  # others write none
        ]
        for target in args.targets
        for weights in args.formats
        for method in args.methods
    ]


def sweep(args: argparse.Namespace) -> dict[Cell, Figures]:
    """All cells, each printed when it is done."""
    results = read_results(args.results)
    wanted = cells_of(args)
    for cells in wanted:
        missing = [cell for cell in cells if cell not in results]
        if not missing:
            continue
        arms = make_arms(missing[0], args)
        for cell in missing:
            results[cell] = run_cell(
                cell, arms, args.cell_seconds, time.process_time if args.cpu_time else time.perf_counter
            )
            print_cell(cell, results[cell])
            if args.results is not None:
                with args.results.open("a") as lines:
                    line = {"cell": dataclasses.asdict(cell), "figures": dataclasses.asdict(results[cell])}
                    lines.write(json.dumps(line) + "\n")
        for llm in arms.values():
            llm.shutdown()
    return {cell: results[cell] for cells in wanted for cell in cells}


def read_results(path: Path | None) -> dict[Cell, Figures]:
    """The cells that were run before."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {Cell(**line["cell"]): Figures(**line["figures"]) for line in lines}


def print_cell(cell: Cell, figures: Figures) -> None:
    """One line."""
    per_step = figures.num_tokens / figures.num_steps
    rate = cell.num_reqs * figures.num_tokens / sum(figures.plain_s)
    print(
        f"{cell} {figures.ratio:6.3f} +- {figures.error:.3f} ({len(figures.plain_s)} rounds; plain with itself "
        f"{figures.chance:.3f}), {per_step:.2f} tokens a step, plain {rate:.0f} tokens/s",
        flush=True,
    )


def print_table(results: dict[Cell, Figures], sizes: Sequence[int]) -> None:
    """Ratios as a table: a row for each target, format and kind, a column for each number of requests."""
    print("\n| target, format, method, kind | " + " | ".join(f"x{size}" for size in sizes) + " |")
    print("| --- |" + " --- |" * len(sizes))
    rows = dict.fromkeys((cell.target, cell.format, cell.method, cell.kind) for cell in results)
    for row in rows:
        found = [results.get(Cell(*row, size)) for size in sizes]
        shown = ["" if one is None else f"{one.ratio:.3f}" for one in found]
        print(f"| {', '.join(row)} | {' | '.join(shown)} |")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default="leaf,qwen-0.5b", help="leaf, or names of benchmarks/checkpoints.py")
    parser.add_argument("--checkpoints", type=Path, default=Path("build/checkpoints"))
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--methods", default=DEFAULT, help="default, suffix, suffix+draft_model, oracle:0.7, ...")
    parser.add_argument("--always", action="store_true", help="verify every draft: there is no controller")
    parser.add_argument("--heads", type=Path, help="a directory of the draft model or heads of the method")
    parser.add_argument("--tree", help="paths that the method's heads draft, as of speculative_token_tree")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}, {STORIES}")
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--cell-seconds", type=float, default=15.0, help="of each cell; at least two rounds")
    parser.add_argument("--results", type=Path, help="a file of cells that are done")
    parser.add_argument("--num-threads", type=int)
    parser.add_argument(
        "--cpu-time", action="store_true", help="with --num-threads 1: processor time, on a busy machine"
    )
    parser.add_argument("--kv-cache-gib", type=float, default=0.75)
    parser.add_argument("--step-cost", action="store_true", help="compare steps without drafts with another tree's")
    parser.add_argument("--against", type=Path, help="that tree: a checkout with its native library built")
    parser.add_argument("--rounds", type=int, default=3, help="of --step-cost")
    args = parser.parse_args()
    if args.cpu_time and args.num_threads != 1:
        parser.error("--cpu-time needs --num-threads 1: threads that wait for work take processor time, too")
    if args.step_cost and args.against is None:
        parser.error("--step-cost needs --against")
    for name in ("targets", "formats", "methods", "kinds"):
        setattr(args, name, getattr(args, name).split(","))
    args.concurrency = [int(size) for size in args.concurrency.split(",")]
    return args


def main() -> int:
    args = parse_args()
    if args.step_cost:
        return compare_trees(args.against, args.rounds)
    with writing_given_texts(max(args.concurrency), MAX_LEN):
        results = sweep(args)
    print_table(results, args.concurrency)
    print("\nfrom the best cell to the worst:")
    for cell, figures in sorted(results.items(), key=lambda item: -item[1].ratio):
        print_cell(cell, figures)
    chances = [figures.chance for figures in results.values()]
    num_slower = sum(figures.is_slower for figures in results.values())
    print(f"plain with itself {min(chances):.3f} to {max(chances):.3f}; cells certainly under {BAR}: {num_slower}")
    print(f"{min(figures.ratio for figures in results.values()):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
