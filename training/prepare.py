"""Writes the tokenized corpus as flat files. Run once before train.py.

`python -m training.prepare` makes, with a few processes, in the build folder:
tokens.npy (uint16), answer.npy (bool, True where a token belongs to an answer),
starts.npy (int64, first token of each document, plus the total), tasks.npy (uint8,
index into tasks.json) and phases.npy (uint8, index into mixture.PHASES). Same seed, same files.
"""

from __future__ import annotations

import argparse
import itertools
import json
from multiprocessing import Pool
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from training.corpus.registry import training_samples
from training.mixture import PHASES
from training.tokenizer import render

BATCH = 500  # samples that are tokenized together


class Job(NamedTuple):
    """One part of the corpus.

    Attributes:
        tokenizer: File.
        seed: Of the part.
        phase: Index into `PHASES`.
        tokens: The part ends with the document that reaches so many.
        longest: Longer documents are left out, in tokens.
    """

    tokenizer: str
    seed: int
    phase: int
    tokens: int
    longest: int


class Part(NamedTuple):
    """Token ids, whether each belongs to an answer, lengths of documents, their tasks, and the phase of all of them."""

    ids: np.ndarray
    answer: np.ndarray
    lengths: np.ndarray
    tasks: list[str]
    phase: int


def encode_part(job: Job) -> Part:
    """Generates and tokenizes one part of the corpus."""
    tokenizer = Tokenizer.from_file(job.tokenizer)
    ids: list[int] = []
    flags: list[bool] = []
    lengths: list[int] = []
    tasks: list[str] = []
    stream = training_samples(job.seed, PHASES[job.phase].weights)
    while len(ids) < job.tokens:
        samples = list(itertools.islice(stream, BATCH))
        pieces = [render(s) for s in samples]
        encoded = iter(tokenizer.encode_batch([t for p in pieces for t, _ in p], add_special_tokens=False))
        for sample, parts in zip(samples, pieces):
            rows = [(next(encoded).ids, answer) for _, answer in parts]
            length = sum(len(r) for r, _ in rows)
            if length > job.longest or len(ids) >= job.tokens:
                continue
            for row, answer in rows:
                ids += row
                flags += [answer] * len(row)
            lengths.append(length)
            tasks.append(sample.task)
    return Part(np.array(ids, np.uint16), np.array(flags, bool), np.array(lengths, np.int64), tasks, job.phase)


def jobs_of(tokenizer: str, seed: int, tokens: int, part: int, longest: int) -> list[Job]:
    """Parts of at most `part` tokens, phase after phase; each has a seed of its own."""
    jobs: list[Job] = []
    for number, phase in enumerate(PHASES):
        left = round(tokens * phase.share)
        while left > 0:
            jobs.append(Job(tokenizer, seed + len(jobs), number, min(part, left), longest))
            left -= part
    return jobs


def write(parts: list[Part], folder: Path) -> list[str]:
    """Writes the corpus; returns the names of its tasks."""
    names = sorted({t for p in parts for t in p.tasks})
    np.save(folder / "tokens.npy", np.concatenate([p.ids for p in parts]))
    np.save(folder / "answer.npy", np.concatenate([p.answer for p in parts]))
    np.save(folder / "starts.npy", np.concatenate([[0], np.cumsum(np.concatenate([p.lengths for p in parts]))]))
    np.save(folder / "tasks.npy", np.array([names.index(t) for p in parts for t in p.tasks], np.uint8))
    np.save(folder / "phases.npy", np.concatenate([np.full(len(p.lengths), p.phase, np.uint8) for p in parts]))
    (folder / "tasks.json").write_text(json.dumps(names))
    return names


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"))
    parser.add_argument("--tokens", type=float, default=28e6, help="tokens of the first cycle of the schedule")
    parser.add_argument("--part", type=int, default=1_000_000, help="tokens per part")
    parser.add_argument("--longest", type=int, default=1024, help="longest document, in tokens")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=100, help="seed of the first part")
    args = parser.parse_args()
    jobs = jobs_of(str(args.out / "tokenizer.json"), args.seed, int(args.tokens), args.part, args.longest)
    with Pool(args.processes) as pool:
        parts = pool.map(encode_part, jobs, chunksize=1)
    write(parts, args.out)
    for number, phase in enumerate(PHASES):
        print(f"{phase.name}: {sum(len(p.ids) for p in parts if p.phase == number)} tokens")
        for task in phase.weights:
            lengths = [n for p in parts if p.phase == number for t, n in zip(p.tasks, p.lengths) if t == task]
            print(f"  {task:20s} {len(lengths):8d} documents {int(sum(lengths)):10d} tokens")


if __name__ == "__main__":
    main()
