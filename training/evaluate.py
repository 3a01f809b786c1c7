"""Scores `leaf` on held-out prompts, task by task.

`python -m training.evaluate` reads the trainer's checkpoint; `--model DIR` reads an
exported folder; `--engine quire` asks the engine instead of the plain-torch code,
with `--quantization` too, and then measures the perplexity of the right answers.
Greedy answers; the last line printed is one JSON object. No state.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from training.corpus.base import Sample, is_right
from training.corpus.registry import EVALUATED, MEASURED, held_out_samples
from training.generate import generate_texts
from training.model import Leaf, LeafConfig
from training.tokenizer import IM_END, prompt_text

if TYPE_CHECKING:
    from quire import LLM

MAX_TOKENS = 200
Answer = Callable[[list[Sample]], list[tuple[str, bool]]]


def load_model(checkpoint: Path | None, folder: Path | None) -> Leaf:
    """Loads float32 weights from a trainer checkpoint or from an exported folder."""
    if folder is not None:
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        known = {k: config[k] for k in LeafConfig().to_dict()}
        weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        model = Leaf(LeafConfig(**known))
    else:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model, weights = Leaf(LeafConfig(**state["config"])), state["model"]
    model.load_state_dict(weights)
    return model.eval()


def torch_answers(model: Leaf, tokenizer: Tokenizer) -> Answer:
    """Answers with the plain-torch model of this package."""
    return lambda samples: generate_texts(model, tokenizer, [prompt_text(s) for s in samples], MAX_TOKENS)


def quire_answers(llm: LLM) -> Answer:
    """Answers with the engine: `LLM.chat`."""
    from quire import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def answer(samples: list[Sample]) -> list[tuple[str, bool]]:
        results: list[tuple[str, bool]] = [("", False)] * len(samples)
        plain = [i for i, s in enumerate(samples) if not s.tools]
        groups = ([plain] if plain else []) + [[i] for i, s in enumerate(samples) if s.tools]
        for rows in groups:  # chat() takes one list of tools for all conversations
            outputs = llm.chat([samples[i].messages for i in rows], params, tools=samples[rows[0]].tools)
            for i, output in zip(rows, outputs):
                results[i] = (output.outputs[0].text, output.outputs[0].finish_reason == "stop")
        return results

    return answer


def perplexity(llm: LLM, samples: list[Sample]) -> float:
    """Per token of the right answers, the end of the turn included: e to the mean of -logprob."""
    from quire import SamplingParams

    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.encode(prompt_text(s), add_special_tokens=False) for s in samples]
    answers = [[*tokenizer.encode(s.answer, add_special_tokens=False), IM_END] for s in samples]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p + a} for p, a in zip(prompts, answers)], params)
    logprobs = []
    for output, prompt, answer in zip(outputs, prompts, answers):
        of_prompt = output.prompt_logprobs
        assert of_prompt is not None
        for position, token in enumerate(answer, start=len(prompt)):
            line = of_prompt[position]
            assert line is not None
            logprobs.append(line[token].logprob)
    return math.exp(-sum(logprobs) / len(logprobs))


def score(answer: Answer, task: str, count: int, show: int = 0) -> dict[str, float]:
    """Scores one task.

    Args:
        answer: The model.
        task: Name of the task.
        count: Number of held-out prompts.
        show: Number of wrong answers to print.

    Returns:
        {"accuracy": share of right answers, "ended": share of ended turns}.
    """
    samples = held_out_samples(task, count)
    replies = answer(samples)
    right = [is_right(text, s.check) for s, (text, _) in zip(samples, replies)]
    for sample, (text, _), good in zip(samples, replies, right):
        if show and not good:
            show -= 1
            print(f"  WRONG {sample.messages[-1]['content']!r}\n    wanted {sample.answer!r}\n    got    {text!r}")
    return {"accuracy": sum(right) / count, "ended": sum(e for _, e in replies) / count}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"), help="folder of the trainer")
    parser.add_argument("--model", default=None, help="exported folder (torch), or model name (quire)")
    parser.add_argument("--engine", choices=("torch", "quire"), default="torch")
    parser.add_argument("--count", type=int, default=500, help="prompts a task")
    parser.add_argument("--tasks", nargs="*", default=list(EVALUATED))
    parser.add_argument("--measured", action="store_true", help="only the four measured tasks")
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print, a task")
    parser.add_argument("--quantization", choices=("int8", "int4"), default=None, help="of the engine's weights")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--save", type=Path, default=None, help="file for the JSON object too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    llm = None
    if args.engine == "quire":
        from quire import LLM

        llm = LLM(args.model or "leaf", quantization=args.quantization)
        answer = quire_answers(llm)
    else:
        folder = Path(args.model) if args.model else None
        tokenizer = Tokenizer.from_file(str((folder or args.out) / "tokenizer.json"))
        answer = torch_answers(load_model(args.out / "checkpoint.pt", folder), tokenizer)
    scores = {}
    for task in MEASURED if args.measured else args.tasks:
        start = time.monotonic()
        scores[task] = score(answer, task, args.count, args.show)
        if llm is not None:
            scores[task]["perplexity"] = perplexity(llm, held_out_samples(task, args.count))
        print(
            f"{task:18s} right {scores[task]['accuracy']:6.1%}  ended {scores[task]['ended']:6.1%}  "
            f"perplexity {scores[task].get('perplexity', math.nan):.4f}  "
            f"({time.monotonic() - start:.0f} s)",
            flush=True,
        )
    summary = json.dumps(
        {"count": args.count, "engine": args.engine, "quantization": args.quantization, "scores": scores}
    )
    if args.save:
        args.save.write_text(summary + "\n")
    print(summary)


if __name__ == "__main__":
    main()
