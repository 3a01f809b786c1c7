"""Trains one head: `python -m training.heads.train eagle` after heads/distill.py.

All three learn the target's distributions (the softmax of its logits) and not tokens alone. Length is a number of
epochs, so that seed and files decide about the weights; each has one thread. Stopped runs go on from their checkpoint:
eagle.pt, medusa.pt or draft.pt in the folder of the training set.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import fused
from training.evaluate import load_model
from training.heads.distill import hidden_batch, read_hidden
from training.heads.eagle import EagleHead
from training.heads.medusa import MedusaHeads
from training.memory import keep_freed_memory
from training.model import Leaf, LeafConfig
from training.train import Loss, Settings, Trainer, fast_dtype

DEPTH = 4  # tokens that the draft model and the EAGLE head draft in a step, one after the other
MEDUSA_HEADS = 6  # tokens that the Medusa heads draft at once: one more costs little
MEDUSA_LAYERS = 1
DEPTHS = {"draft": DEPTH, "eagle": DEPTH, "medusa": MEDUSA_HEADS}
STATE_WEIGHT = 0.2  # of the distance of estimated hidden states, beside the distributions
PASS_DECAY = 0.8  # a draft counts only if those before it stood


def draft_config(target: LeafConfig) -> LeafConfig:
    """A narrower, shallower model whose keys and values have the target's sizes, so that both fit the same pages."""
    return replace(target, hidden_size=128, intermediate_size=352, num_hidden_layers=3)


def make_draft(target: Leaf, config: LeafConfig, seed: int) -> Leaf:
    """A new draft model; its embedding is the best projection of the target's to fewer dimensions."""
    model = Leaf(config, seed)
    embedding = target.model.embed_tokens.weight.detach().double()
    _, _, directions = torch.linalg.svd(embedding - embedding.mean(0), full_matrices=False)
    directions = directions[: config.hidden_size]
    # Signs of singular vectors are the library's choice: the largest part of each is positive.
    signs = directions.gather(1, directions.abs().argmax(1, keepdim=True)).sign()
    projected = (embedding @ (directions * signs).T).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(projected * (0.02 / projected.std()))
    return model


class _HeadTrainer(Trainer):
    """A trainer whose batches have the target's hidden states.

    Args:
        settings: Of the run; `settings.folder` is the training set.
        model: The head.
        target: The model to speculate for.
    """

    def __init__(self, settings: Settings, model: nn.Module, target: Leaf) -> None:
        super().__init__(settings, model)
        self.embedding = target.model.embed_tokens.weight.detach()
        self.stored = read_hidden(settings.folder)
        self.parts: list[list[float]] = []

    def batch(self, docs: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids [batch, time], loss weights [batch, time], hidden states [batch, time, hidden]."""
        ids, _, weights = self.corpus.batch(docs, "cpu", whole=True)
        return ids, weights, hidden_batch(self.stored, self.corpus, docs, ids.shape[1]).float()

    def report(self, speed: float) -> str:
        """One line with the mean loss of each draft position (nats per token)."""
        means = " ".join(f"{m:.3f}" for m in np.mean(self.parts, 0))
        self.parts = []
        return f"step {self.step} epoch {self.epoch} {self.tokens / self.total:.1%} {speed:.0f} tok/s | {means}"

    def weigh(self, losses: list[Tensor]) -> Tensor:
        """Means of several positions as one loss."""
        self.parts.append([float(loss.detach()) for loss in losses])
        scale = [PASS_DECAY**i for i in range(len(losses))]
        return torch.stack([s * loss for s, loss in zip(scale, losses)]).sum() / sum(scale)


class EagleTrainer(_HeadTrainer):
    """Trains an `EagleHead` as it will draft: estimates are fed back `DEPTH` - 1 times."""

    def loss(self, docs: np.ndarray) -> Loss:
        """The mean over passes; see `EagleHead.passes` for rows."""
        ids, weights, hidden = self.batch(docs)
        embeddings = F.embedding(ids[:, 1:], self.embedding)
        outputs = self.model.passes(embeddings, hidden[:, :-1], DEPTH)
        is_answer = weights[:, 2:] == 1.0
        states = hidden[:, 1:-1][is_answer]
        wanted = F.linear(states, self.embedding).float().softmax(-1)
        row = torch.arange(ids.shape[1] - 2).expand_as(is_answer)[is_answer]
        losses = []
        for p, output in enumerate(outputs):
            given = output[:, :-1][is_answer]
            distance = F.smooth_l1_loss(given.float(), states, reduction="none").mean(-1)
            each = fused.soft_cross_entropy(F.linear(given, self.embedding), wanted) + STATE_WEIGHT * distance
            losses.append(each[row >= p].mean())
        return Loss(self.weigh(losses), 1.0)


class MedusaTrainer(_HeadTrainer):
    """Trains all `MedusaHeads` at once."""

    def loss(self, docs: np.ndarray) -> Loss:
        """The mean over heads, for the same tokens: head i has that at place t from the hidden state at t - 2 - i."""
        ids, weights, hidden = self.batch(docs)
        heads = self.model.medusa_head
        first, last = len(heads) + 1, ids.shape[1]
        is_answer = weights[:, first:] == 1.0
        wanted = F.linear(hidden[:, first - 1 : -1][is_answer], self.embedding).float().softmax(-1)
        losses = []
        for i, head in enumerate(heads):
            given = F.linear(head(hidden[:, first - 2 - i : last - 2 - i][is_answer]), self.embedding)
            losses.append(fused.soft_cross_entropy(given, wanted).mean())
        return Loss(self.weigh(losses), 1.0)


class DraftTrainer(_HeadTrainer):
    """Trains the draft model on all tokens; those of prompts weigh less."""

    def loss(self, docs: np.ndarray) -> Loss:
        """The mean over tokens."""
        ids, weights, hidden = self.batch(docs)
        weights = weights[:, 1:]
        used = weights > 0
        given = self.model.logits(self.model.train_hidden(ids[:, :-1])[used])
        wanted = F.linear(hidden[:, :-1][used], self.embedding).float().softmax(-1)
        each = fused.soft_cross_entropy(given, wanted)
        weights = weights[used]
        self.parts.append([float(each.detach()[weights == 1.0].mean())])
        return Loss((each * weights).sum() / weights.sum(), 1.0)


def _eagle(settings: Settings, target: Leaf) -> _HeadTrainer:
    return EagleTrainer(settings, EagleHead(target.config, settings.seed), target)


def _medusa(settings: Settings, target: Leaf) -> _HeadTrainer:
    return MedusaTrainer(settings, MedusaHeads(target.config.hidden_size, MEDUSA_HEADS, MEDUSA_LAYERS), target)


def _draft(settings: Settings, target: Leaf) -> _HeadTrainer:
    settings = replace(settings, model=draft_config(target.config))
    return DraftTrainer(settings, make_draft(target, settings.model, settings.seed), target)


TRAINERS: dict[str, Callable[[Settings, Leaf], _HeadTrainer]] = {"draft": _draft, "eagle": _eagle, "medusa": _medusa}
SETTINGS = {
    "draft": Settings(Path(), epochs=1, lr_muon=0.02, lr_adam=0.004),
    "eagle": Settings(Path(), epochs=1, lr_muon=0.01, lr_adam=0.002),
    "medusa": Settings(Path(), epochs=4, lr_muon=0.01, lr_adam=0.002),
}


def settings_of(kind: str, folder: Path, epochs: int = 0, seed: int = 0, max_steps: int = 0) -> Settings:
    """What is written down for a head, with the given deviations (0: none)."""
    settings = SETTINGS[kind]
    return replace(
        settings,
        folder=folder,
        epochs=epochs or settings.epochs,
        seed=seed,
        max_steps=max_steps,
        name=kind,
        save_every=60.0,
        dtype=fast_dtype("cpu"),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(TRAINERS))
    parser.add_argument("--out", type=Path, default=Path("build/leaf-heads"))
    parser.add_argument("--target", type=Path, default=Path("quire/assets/leaf"))
    parser.add_argument("--epochs", type=int, default=0, help="0: what is written down")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps (0: at the end)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    settings = settings_of(args.kind, args.out / "train", args.epochs, args.seed, args.max_steps)
    trainer = TRAINERS[args.kind](settings, load_model(None, args.target))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(f"{parameters} parameters, {len(trainer.plan)} batches an epoch, from step {trainer.step}", flush=True)
    if not trainer.run():
        raise SystemExit("stopped before the end; start again to go on")


if __name__ == "__main__":
    main()
