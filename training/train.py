"""Trains `leaf`. `python -m training.train --hours 1.5` after prepare.py.

The learning rate follows the clock: progress = trained seconds / (hours * 3600),
so the decay ends in time on a slow machine too. A checkpoint is written every few
minutes, atomically, and a new start continues exactly where it ended. State on
disk: checkpoint.pt and train.log in the build folder.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import Corpus
from training.model import Leaf, LeafConfig
from training.muon import build_optimisers


@dataclass
class Settings:
    """Everything that decides about a run (lr: step sizes at their peak)."""

    folder: Path
    hours: float
    batch_tokens: int = 3072
    lr_muon: float = 0.02
    lr_adam: float = 0.004
    weight_decay: float = 0.01
    warmup: float = 0.01
    seed: int = 0
    save_every: float = 180.0
    log_every: int = 20
    compile: bool = True
    device: str = "cpu"
    max_steps: int = 0
    model: LeafConfig = field(default_factory=LeafConfig)


def schedule(progress: float, warmup: float) -> float:
    """Learning-rate factor: linear warmup, flat to 30 %, then linear decay to 0."""
    if progress < warmup:
        return progress / warmup + 0.01
    return min(1.0, max(0.0, (1.0 - progress) / 0.7))


def token_losses(model: Leaf, ids: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every token, [batch, time] float32."""
    logits = model.logits(model.hidden(ids)).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


class Trainer:
    """Model, optimisers and position in the data; knows how to save and resume."""

    def __init__(self, settings: Settings) -> None:
        self.s = settings
        self.corpus = Corpus(settings.folder)
        self.model = Leaf(settings.model, settings.seed).to(settings.device)
        self.optimisers = build_optimisers(self.model, settings.lr_muon, settings.lr_adam, settings.weight_decay)
        self.peaks = [[g["lr"] for g in o.param_groups] for o in self.optimisers]
        self.epoch = self.index = self.step = self.tokens = 0
        self.elapsed = 0.0
        self.path = settings.folder / "checkpoint.pt"
        self.losses = torch.compile(token_losses, dynamic=True) if settings.compile else token_losses
        self.sums: dict[str, list[float]] = {}
        if self.path.exists():
            self.load()
        self.plan = self.corpus.plan(settings.seed, self.epoch, settings.batch_tokens)

    def load(self) -> None:
        """Restores model, optimisers and position from the checkpoint."""
        state = torch.load(self.path, map_location=self.s.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"]):
            optimiser.load_state_dict(saved)
        for name in ("epoch", "index", "step", "tokens", "elapsed"):
            setattr(self, name, state[name])

    def save(self) -> None:
        """Writes the checkpoint: first to a temporary file, then renamed."""
        state = {
            "model": self.model.state_dict(),
            "optimisers": [o.state_dict() for o in self.optimisers],
            "config": self.s.model.to_dict(),
            "epoch": self.epoch,
            "index": self.index,
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
        }
        temporary = self.path.with_suffix(".tmp")
        torch.save(state, temporary)
        os.replace(temporary, self.path)

    def train_step(self) -> None:
        """Trains on the next batch."""
        if self.index >= len(self.plan):
            self.epoch, self.index = self.epoch + 1, 0
            self.plan = self.corpus.plan(self.s.seed, self.epoch, self.s.batch_tokens)
        docs = self.plan[self.index]
        ids, targets, weights = self.corpus.batch(docs, self.s.device)
        factor = schedule(self.elapsed / (self.s.hours * 3600), self.s.warmup)
        for optimiser, peaks in zip(self.optimisers, self.peaks):
            for group, peak in zip(optimiser.param_groups, peaks):
                group["lr"] = peak * factor
        with torch.autocast(self.s.device, torch.bfloat16):
            losses = self.losses(self.model, ids, targets)
        (losses * weights).sum().div(weights.sum()).backward()
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad()
        self.index += 1
        self.step += 1
        self.tokens += ids.numel()
        self._count(docs, losses.detach(), weights)

    def _count(self, docs, losses: Tensor, weights: Tensor) -> None:
        answers = (weights == 1.0).float()
        total, count = (losses * answers).sum(1).tolist(), answers.sum(1).tolist()
        for doc, t, c in zip(docs, total, count):
            row = self.sums.setdefault(self.corpus.names[self.corpus.tasks[doc]], [0.0, 0.0])
            row[0] += t
            row[1] += c

    def report(self, speed: float) -> str:
        """One line with the mean answer loss (nats per token) of each task."""
        tasks = " ".join(f"{n}={t / max(c, 1):.3f}" for n, (t, c) in sorted(self.sums.items()))
        self.sums = {}
        return (
            f"step {self.step} epoch {self.epoch} {self.tokens / 1e6:.2f}M tokens {self.elapsed / 60:.1f} min "
            f"{speed:.0f} tok/s | {tasks}"
        )

    def run(self) -> None:
        """Trains until the hours (or max_steps) are used up, or a SIGTERM asks to stop."""
        stop: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
        mark, marked, saved = time.monotonic(), self.tokens, time.monotonic()
        last = mark
        with open(self.s.folder / "train.log", "a") as log:
            while self.elapsed < self.s.hours * 3600 and not stop:
                if self.s.max_steps and self.step >= self.s.max_steps:
                    break
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"))
    parser.add_argument("--hours", type=float, default=1.9)
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--lr-muon", type=float, default=0.02)
    parser.add_argument("--lr-adam", type=float, default=0.004)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: all)")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps (0: by the clock)")
    parser.add_argument("--eager", action="store_true", help="do not use torch.compile")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = Settings(
        args.out,
        args.hours,
        args.batch_tokens,
        args.lr_muon,
        args.lr_adam,
        compile=not args.eager,
        device=device,
        max_steps=args.max_steps,
    )
    trainer = Trainer(settings)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters} parameters, {len(trainer.plan)} batches an epoch, from step {trainer.step}", flush=True)
    trainer.run()


if __name__ == "__main__":
    main()
