"""What the heads learn from: prompts of the corpus, the target's own answers to them, and its hidden states.

`python -m training.heads.distill` asks the engine for answers (a share of them greedy, others at temperature 0.7 and 1,
each with a seed of its own; tokens of the engine are the same on every machine) and runs the plain-torch target over
prompt and answer once. The files are those of prepare.py and hidden.npy: the final hidden states of all tokens,
bfloat16 as uint16; logits are not stored, as they are a product of these with the embedding. A run that was cut off
goes on.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.corpus.base import Sample
from training.corpus.registry import EVALUATED, held_out_samples, training_samples
from training.data import Corpus
from training.evaluate import load_model
from training.mixture import HEADS
from training.model import Leaf
from training.tokenizer import render
from training.train import fast_dtype

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of the answers to learn from, by turns
MAX_TOKENS = 200
PART = 1000  # prompts that are answered before their answers are kept
LONGEST = 512  # tokens of prompt and answer; longer ones are left out
CHAT_SEED = 901  # small talk has no held-out part: prompts of another seed

# (prompts, temperature of each, seed of each) -> answers with their end of turn
Answer = Callable[[list[list[int]], list[float], list[int]], list[list[int]]]


@dataclass(frozen=True)
class Prompt:
    """Token ids up to the answer; `answer[i]`: token i belongs to an earlier answer of the conversation."""

    task: str
    ids: list[int]
    answer: list[bool]


def encode(tokenizer: Tokenizer, sample: Sample) -> Prompt:
    """The prompt of a sample."""
    ids: list[int] = []
    flags: list[bool] = []
    for text, is_answer in render(sample)[:-1]:
        row = tokenizer.encode(text, add_special_tokens=False).ids
        ids += row
        flags += [is_answer] * len(row)
    return Prompt(sample.task, ids, flags)


def engine_answers(model: str) -> Answer:
    """Answers of the engine."""
    from quire import LLM, SamplingParams

    llm = LLM(model)

    def answer(prompts: list[list[int]], temperatures: list[float], seeds: list[int]) -> list[list[int]]:
        params = [
            SamplingParams(temperature=t, seed=s, max_tokens=MAX_TOKENS, detokenize=False)
            for t, s in zip(temperatures, seeds)
        ]
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs]

    return answer


@torch.inference_mode()
def hidden_states(model: Leaf, corpus: Corpus, out: np.ndarray, batch_tokens: int = 4096) -> None:
    """Fills `out` [num_tokens, hidden_size] uint16 with the target's final hidden states, as bits of bfloat16."""
    is_narrow = fast_dtype("cpu") == torch.bfloat16
    for docs in corpus.plan(0, 0, batch_tokens):
        ids, _, _ = corpus.batch(docs, "cpu", whole=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_narrow):
            hidden = model.hidden(ids).to(torch.bfloat16)
        for row, doc in zip(hidden, docs):
            a, b = int(corpus.starts[doc]), int(corpus.starts[doc + 1])
            out[a:b] = row[: b - a].view(torch.uint16).numpy()


def kept_answers(answer: Answer, folder: Path, prompts: list[Prompt], temperatures: list[float]) -> list[list[int]]:
    """Answers to all prompts, prompt i with seed i; each `PART` is kept in `folder` as soon as it is there.

    What an engine answers does not depend on what else it is asked, so those of a run that was cut off are the same.
    """
    found: list[list[int]] = []
    folder.mkdir(parents=True, exist_ok=True)
    for begin in range(0, len(prompts), PART):
        file, end = folder / f"answers-{begin}.json", min(begin + PART, len(prompts))
        if not file.exists():
            part = answer([p.ids for p in prompts[begin:end]], temperatures[begin:end], list(range(begin, end)))
            unfinished = file.with_suffix(".tmp")
            unfinished.write_text(json.dumps(part))
            unfinished.rename(file)
            print(f"{folder.name}: {end} of {len(prompts)} answers", flush=True)
        found += json.loads(file.read_text())
    return found


def write(folder: Path, prompts: list[Prompt], answers: list[list[int]], model: Leaf) -> None:
    """Writes the documents and the hidden states of `model` at all their tokens."""
    kept = [(p, a) for p, a in zip(prompts, answers) if a and len(p.ids) + len(a) <= LONGEST]
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({p.task for p, _ in kept})
    lengths = [len(p.ids) + len(a) for p, a in kept]
    np.save(folder / "tokens.npy", np.concatenate([np.array(p.ids + a, np.uint16) for p, a in kept]))
    np.save(folder / "answer.npy", np.concatenate([np.array(p.answer + [True] * len(a)) for p, a in kept]))
    np.save(folder / "starts.npy", np.concatenate([[0], np.cumsum(lengths)]))
    np.save(folder / "tasks.npy", np.array([names.index(p.task) for p, _ in kept], np.uint8))
    (folder / "tasks.json").write_text(json.dumps(names))
    unfinished = folder / "hidden.tmp.npy"
    shape = (sum(lengths), model.config.hidden_size)
    out = np.lib.format.open_memmap(unfinished, mode="w+", dtype=np.uint16, shape=shape)
    hidden_states(model, Corpus(folder), out)
    out.flush()
    unfinished.rename(folder / "hidden.npy")


def read_hidden(folder: Path) -> np.ndarray:
    """Memory-mapped hidden states, [num_tokens, hidden_size] uint16 (bits of bfloat16)."""
    return np.load(folder / "hidden.npy", mmap_mode="r")


def hidden_batch(hidden: np.ndarray, corpus: Corpus, docs: np.ndarray, longest: int) -> Tensor:
    """Hidden states of documents, padded with zeros, [batch, longest, hidden_size] bfloat16."""
    out = torch.zeros(len(docs), longest, hidden.shape[1], dtype=torch.bfloat16)
    for row, doc in enumerate(docs):
        a, b = int(corpus.starts[doc]), int(corpus.starts[doc + 1])
        out[row, : b - a] = torch.from_numpy(np.array(hidden[a:b])).view(torch.bfloat16)
    return out


def training_prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[Prompt]:
    """Prompts of the mixture of heads."""
    return [encode(tokenizer, s) for s in itertools.islice(training_samples(seed, HEADS.weights), count)]


def held_out_prompts(tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """`count` held-out prompts of each measured task, and as many of small talk."""
    samples = [s for task in EVALUATED if task != "comparing" for s in held_out_samples(task, count)]
    chat = itertools.islice(training_samples(CHAT_SEED, {"chat": 1.0}), count)
    return [encode(tokenizer, s) for s in [*samples, *chat]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf-heads"))
    parser.add_argument("--target", type=Path, default=Path("quire/assets/leaf"), help="the model to speculate for")
    parser.add_argument("--samples", type=int, default=16000, help="conversations to learn from")
    parser.add_argument("--held-out", type=int, default=40, help="prompts of each measured task")
    parser.add_argument("--seed", type=int, default=500)
    args = parser.parse_args()
    answer = engine_answers(str(args.target.resolve()))
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    model = load_model(None, args.target)
    held_out = held_out_prompts(tokenizer, args.held_out)
    sets = {
        "greedy": (held_out, [0.0] * len(held_out)),
        "sampled": (held_out, [1.0] * len(held_out)),
    }
    learned = training_prompts(tokenizer, args.samples, args.seed)
    sets["train"] = (learned, [TEMPERATURES[i % len(TEMPERATURES)] for i in range(len(learned))])
    for name, (prompts, temperatures) in sets.items():
        if not (args.out / name / "hidden.npy").exists():
            answers = kept_answers(answer, args.out / name, prompts, temperatures)
            write(args.out / name, prompts, answers, model)
        print(f"{name}: {len(Corpus(args.out / name).tokens)} tokens", flush=True)


if __name__ == "__main__":
    main()
