"""Trains `leaf`. `python -m training.train` after prepare.py.

One pass over the corpus, in the order of its phases; the learning rate follows the share of tokens that are done, in
each of its cycles (mixture.py). So the weights depend on the files of prepare.py and the seed alone, on one machine
with one number of threads. A checkpoint is written every minute, atomically, and a new start continues exactly where it
ended. State on disk, in the build folder: checkpoint.pt, checkpoint.log, and checkpoint-cycle-1.pt, ... with the
weights at the end of each cycle before the last.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from training import fused
from training.data import Corpus
from training.memory import keep_freed_memory
from training.mixture import CYCLES
from training.model import Leaf, LeafConfig
from training.muon import build_optimisers

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Settings:
    """Everything that decides about a run.

    `lr_muon`, `lr_adam`: step sizes at their peak; `warmup`: share of all tokens; `threads`: parts of a batch that are
    computed at the same time; `dtype`: of matrix products; `cycles`: phases with which a cycle of step sizes
    begins, rising.
    """

    folder: Path
    epochs: int = 1
    batch_tokens: int = 3072
    lr_muon: float = 0.02
    lr_adam: float = 0.004
    weight_decay: float = 0.01
    warmup: float = 0.01
    seed: int = 0
    save_every: float = 60.0
    log_every: int = 20
    device: str = "cpu"
    max_steps: int = 0
    model: LeafConfig = field(default_factory=LeafConfig)
    name: str = "checkpoint"
    threads: int = 1
    dtype: torch.dtype = torch.bfloat16
    cycles: tuple[int, ...] = (0,)


def fast_dtype(device: str) -> torch.dtype:
    """The type in which `device` multiplies matrices fastest: CPUs without instructions for bfloat16 emulate it."""
    if device == "cpu" and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.float32
    return torch.bfloat16


def schedule(progress: float, warmup: float) -> float:
    """Learning-rate factor: linear warmup, flat to 30 %, then linear decay to 0."""
    if progress < warmup:
        return progress / warmup + 0.01
    return min(1.0, max(0.0, (1.0 - progress) / 0.7))


class Cycle(NamedTuple):
    """Step sizes rise and fall once from `begin` to `end`, in tokens."""

    begin: int
    end: int


def cycle_file(checkpoint: Path, number: int) -> Path:
    """The file with the weights at the end of a cycle before the last; the first is number 1."""
    return checkpoint.with_name(f"{checkpoint.stem}-cycle-{number}.pt")


class Loss(NamedTuple):
    """Of some documents of a batch.

    Attributes:
        mean: Over their tokens, with a gradient.
        weight: Of this mean in that of the batch: the sum of the tokens' weights.
    """

    mean: Tensor
    weight: float


def _write(state: dict[str, Any], file: Path) -> None:
    temporary = file.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, file)


class Trainer:
    """Model, optimisers and position in the data; saves and resumes.

    A batch is divided among `settings.threads` threads with one core each: operations are too short to be divided
    themselves. Gradients are added in the order of the documents, so the number of threads decides about last bits.

    Args:
        settings: Of the run.
        model: What to train; None: a new `Leaf` of `settings.model`. Others need a `loss` of their own.
    """

    def __init__(self, settings: Settings, model: nn.Module | None = None) -> None:
        self.s = settings
        self.corpus = Corpus(settings.folder)
        self.model = (model or Leaf(settings.model, settings.seed)).to(settings.device)
        self.pool = ThreadPoolExecutor(settings.threads, initializer=torch.set_num_threads, initargs=(1,))
        self.lock = threading.Lock()
        rates = settings.lr_muon, settings.lr_adam, settings.weight_decay
        self.optimisers = build_optimisers(self.model, *rates, settings.threads, self.pool.map, settings.dtype)
        self.peaks = [[g["lr"] for g in o.param_groups] for o in self.optimisers]
        self.epoch = self.index = self.step = self.tokens = 0
        self.elapsed = 0.0
        self.path = settings.folder / f"{settings.name}.pt"
        self.sums: dict[str, list[float]] = {}
        self.plan = self.corpus.plan(settings.seed, 0, settings.batch_tokens)
        self.total = settings.epochs * self.corpus.padded_tokens(self.plan)
        self.cycles = self._cycles()
        if self.path.exists():
            self.load()

    def _cycles(self) -> list[Cycle]:
        before = [[docs for docs in self.plan if self.corpus.phases[docs[0]] < first] for first in self.s.cycles]
        begins = [self.corpus.padded_tokens(batches) for batches in before]
        return [Cycle(begin, end) for begin, end in zip(begins, [*begins[1:], self.total])]

    def step_size(self) -> float:
        """Of the next step, as a share of the peaks of the settings."""
        begin, end = next(cycle for cycle in reversed(self.cycles) if cycle.begin <= self.tokens)
        return schedule((self.tokens - begin) / (end - begin), self.s.warmup)

    def load(self) -> None:
        """Restores model, optimisers and position from the checkpoint."""
        state = torch.load(self.path, map_location=self.s.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"]):
            optimiser.load_state_dict(saved)
        for name in ("epoch", "index", "step", "tokens", "elapsed"):
            setattr(self, name, state[name])
        self.plan = self.corpus.plan(self.s.seed, self.epoch, self.s.batch_tokens)

    def save(self) -> None:
        """Writes the checkpoint: first to a temporary file, then renamed."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "config": self.s.model.to_dict(),
            "seed": self.s.seed,
            "epoch": self.epoch,
            "index": self.index,
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
        }
        _write(state, self.path)

    def loss(self, docs: np.ndarray) -> Loss:
        """The loss of a batch, or of a thread's part of it."""
        ids, targets, weights = self.corpus.batch(docs, self.s.device)
        hidden = self.model.train_hidden(ids)
        matrix = self.model.model.embed_tokens.weight.to(hidden.dtype)
        mean, losses = fused.cross_entropy(hidden, matrix, targets, weights)
        self._count(docs, losses, weights)
        return Loss(mean, float(weights.sum()))

    def _forward(self, docs: np.ndarray) -> Loss:
        # The cache of casts is one for all threads, so it is for one thread only.
        is_narrow = self.s.dtype != torch.float32
        with torch.autocast(self.s.device, self.s.dtype, enabled=is_narrow, cache_enabled=self.s.threads == 1):
            return self.loss(docs)

    def _gradients(self, docs: np.ndarray) -> None:
        """Leaves the gradient of a batch in the parameters."""
        parts = [part for part in np.array_split(docs, self.s.threads) if len(part)]
        losses = list(self.pool.map(self._forward, parts))
        total = sum(loss.weight for loss in losses)
        parameters = list(self.model.parameters())

        def backward(loss: Loss) -> tuple[Tensor, ...]:
            return torch.autograd.grad(loss.mean * (loss.weight / total), parameters)

        first, *others = self.pool.map(backward, losses)
        for other in others:
            torch._foreach_add_(first, other)
        for parameter, gradient in zip(parameters, first):
            parameter.grad = gradient

    def train_step(self) -> None:
        """Trains on the next batch."""
        docs = self.plan[self.index]
        factor = self.step_size()
        for optimiser, peaks in zip(self.optimisers, self.peaks):
            for group, peak in zip(optimiser.param_groups, peaks):
                group["lr"] = peak * factor
        self._gradients(docs)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.index += 1
        self.step += 1
        self.tokens += self.corpus.padded_tokens([docs])
        for number, cycle in enumerate(self.cycles[:-1], 1):
            if cycle.end == self.tokens:
                _write(self.model.state_dict(), cycle_file(self.path, number))
        if self.index >= len(self.plan):
            self.epoch, self.index = self.epoch + 1, 0
            self.plan = self.corpus.plan(self.s.seed, self.epoch, self.s.batch_tokens)

    def _count(self, docs: np.ndarray, losses: Tensor, weights: Tensor) -> None:
        answers = (weights == 1.0).float()
        total, count = (losses * answers).sum(1).tolist(), answers.sum(1).tolist()
        with self.lock:
            for doc, t, c in zip(docs, total, count):
                row = self.sums.setdefault(self.corpus.names[self.corpus.tasks[doc]], [0.0, 0.0])
                row[0] += t
                row[1] += c

    def report(self, speed: float) -> str:
        """One line with the mean answer loss (nats per token) of each task."""
        tasks = " ".join(f"{n}={t / max(c, 1):.3f}" for n, (t, c) in sorted(self.sums.items()))
        self.sums = {}
        return (
            f"step {self.step} epoch {self.epoch} {self.tokens / 1e6:.2f}M tokens of {self.total / 1e6:.2f}M "
            f"{self.elapsed / 60:.1f} min {speed:.0f} tok/s | {tasks}"
        )

    def is_done(self) -> bool:
        """Whether all epochs (or `max_steps`) are behind."""
        return self.epoch >= self.s.epochs or bool(self.s.max_steps and self.step >= self.s.max_steps)

    def run(self) -> bool:
        """Trains to the end, or until a SIGTERM asks to stop; returns whether it came to the end."""
        stop: list[int] = []
        before = signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
        mark, marked, saved = time.monotonic(), self.tokens, time.monotonic()
        last = mark
        with open(self.path.with_suffix(".log"), "a") as log:
            while not self.is_done() and not stop:
                self.train_step()
                now = time.monotonic()
                self.elapsed, last = self.elapsed + now - last, now
                if self.step % self.s.log_every == 0:
                    line = self.report((self.tokens - marked) / (now - mark))
                    mark, marked = now, self.tokens
                    print(line, flush=True)
                    print(line, file=log, flush=True)
                if now - saved > self.s.save_every:
                    self.save()
                    saved = time.monotonic()
        self.save()
        signal.signal(signal.SIGTERM, before)
        return self.is_done()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"))
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--lr-muon", type=float, default=0.02)
    parser.add_argument("--lr-adam", type=float, default=0.004)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="parts of a batch, each with a core (0: all cores)")
    parser.add_argument("--dtype", choices=DTYPES, help="of matrix products (default: what is fastest here)")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps (0: at the end)")
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between checkpoints")
    args = parser.parse_args()
    keep_freed_memory()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    settings = Settings(
        args.out,
        batch_tokens=args.batch_tokens,
        lr_muon=args.lr_muon,
        lr_adam=args.lr_adam,
        seed=args.seed,
        device=device,
        max_steps=args.max_steps,
        save_every=args.save_every,
        threads=(args.threads or os.cpu_count() or 1) if device == "cpu" else 1,
        dtype=DTYPES[args.dtype] if args.dtype else fast_dtype(device),
        cycles=CYCLES,
    )
    trainer = Trainer(settings)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters} parameters, {len(trainer.plan)} batches an epoch, from step {trainer.step}", flush=True)
    before, cpu = trainer.tokens, time.process_time()
    finished = trainer.run()
    print(f"{(trainer.tokens - before) / (time.process_time() - cpu):.0f} tokens a CPU second", flush=True)
    if not finished:
        raise SystemExit("stopped before the end; start again to go on")


if __name__ == "__main__":
    main()
