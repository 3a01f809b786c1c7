"""Writes the tokenized corpus as flat files. Run once before train.py.

`python -m training.prepare` makes, with a few processes, in the build folder:
tokens.npy (uint16), answer.npy (bool, True where a token belongs to an answer),
starts.npy (int64, first token of each document, plus the total) and tasks.npy
(uint8, index into tasks.json). Same seed, same files.
"""

from __future__ import annotations

import argparse
import itertools
import json
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.corpus.registry import training_samples
from training.tokenizer import render

Part = tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]


def encode_part(job: tuple[str, int, int, int]) -> Part:
    """Generates and tokenizes one part of the corpus.

    Args:
        job: (tokenizer file, seed of the part, number of samples, longest document in tokens).

    Returns:
        Token ids, answer flags, document lengths, and task names.
    """
    path, seed, count, longest = job
    tokenizer = Tokenizer.from_file(path)
    ids: list[int] = []
    flags: list[bool] = []
    lengths: list[int] = []
    tasks: list[str] = []
    stream = training_samples(seed)
    for start in range(0, count, 2000):
        samples = list(itertools.islice(stream, min(2000, count - start)))
        pieces = [render(s) for s in samples]
        encoded = iter(tokenizer.encode_batch([t for p in pieces for t, _ in p], add_special_tokens=False))
        for sample, parts in zip(samples, pieces):
            rows = [(next(encoded).ids, answer) for _, answer in parts]
            length = sum(len(r) for r, _ in rows)
            if length > longest:
                continue
            for row, answer in rows:
                ids += row
                flags += [answer] * len(row)
            lengths.append(length)
            tasks.append(sample.task)
    return np.array(ids, np.uint16), np.array(flags, bool), np.array(lengths, np.int64), tasks


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"))
    parser.add_argument("--samples", type=int, default=200000)
    parser.add_argument("--part", type=int, default=10000, help="samples per part")
    parser.add_argument("--longest", type=int, default=1024, help="longest document, in tokens")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=100, help="seed of the first part")
    args = parser.parse_args()
    path = str(args.out / "tokenizer.json")
    jobs = [
        (path, args.seed + i, min(args.part, args.samples - i * args.part), args.longest)
        for i in range((args.samples + args.part - 1) // args.part)
    ]
    with Pool(args.processes) as pool:
        parts = pool.map(encode_part, jobs, chunksize=1)
    names = sorted({t for p in parts for t in p[3]})
    lengths = np.concatenate([p[2] for p in parts])
    tasks = np.array([names.index(t) for p in parts for t in p[3]], np.uint8)
    np.save(args.out / "tokens.npy", np.concatenate([p[0] for p in parts]))
    np.save(args.out / "answer.npy", np.concatenate([p[1] for p in parts]))
    np.save(args.out / "starts.npy", np.concatenate([[0], np.cumsum(lengths)]))
    np.save(args.out / "tasks.npy", tasks)
    (args.out / "tasks.json").write_text(json.dumps(names))
    for i, name in enumerate(names):
        print(f"{name:20s} {int((tasks == i).sum()):8d} documents {int(lengths[tasks == i].sum()):10d} tokens")
    print(f"total {len(lengths)} documents, {int(lengths.sum())} tokens, longest {int(lengths.max())}")


if __name__ == "__main__":
    main()
