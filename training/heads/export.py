"""Writes trained heads beside their target, measures them, and says so in the target's model card.

`python -m training.heads.export` makes TARGET/draft, TARGET/eagle and TARGET/medusa, each with config.json,
model.safetensors (bfloat16) and card.json (seed, digests, acceptance), and rewrites the part of TARGET/README.md
about them. Layouts are those of published checkpoints; see docs/adr/0084-heads-of-the-embedded-model.md.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from training.evaluate import load_model
from training.export import COPIED, digest, hf_config
from training.heads.acceptance import Drafts, acceptance, eagle_drafts, medusa_drafts, model_drafts
from training.heads.eagle import EagleHead
from training.heads.medusa import MedusaHeads
from training.heads.train import DEPTHS, MEDUSA_HEADS, MEDUSA_LAYERS, TRAINERS, draft_config
from training.model import Leaf, LeafConfig

SIZE_LIMIT = 8_000_000  # bytes of all heads together
HEADING = "## Speculation heads"
TITLES = {"draft": "draft model", "eagle": "EAGLE-1 head", "medusa": f"{MEDUSA_HEADS} Medusa heads"}


def eagle_config(target: LeafConfig) -> dict[str, Any]:
    """config.json of the EAGLE head: a Llama of one layer; `bias` is that of fc."""
    config = {**hf_config(target), "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    return {**config, "bias": False, "mlp_bias": False}


def medusa_config(target: LeafConfig) -> dict[str, Any]:
    """config.json of the Medusa heads."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "medusa_num_heads": MEDUSA_HEADS,
        "medusa_num_layers": MEDUSA_LAYERS,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "bfloat16",
    }


def config_of(kind: str, target: LeafConfig) -> dict[str, Any]:
    """config.json of a head."""
    if kind == "draft":
        return hf_config(draft_config(target))
    return eagle_config(target) if kind == "eagle" else medusa_config(target)


def read_head(kind: str, folder: Path, target: Leaf) -> tuple[nn.Module, Drafts]:
    """An exported head in float32, and its drafts."""
    weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    embedding = target.model.embed_tokens.weight.detach()
    if kind == "draft":
        model = Leaf(draft_config(target.config))
        drafts = model_drafts(model)
    elif kind == "eagle":
        model = EagleHead(target.config)
        drafts = eagle_drafts(model, embedding)
    else:
        model = MedusaHeads(target.config.hidden_size, MEDUSA_HEADS, MEDUSA_LAYERS)
        drafts = medusa_drafts(model, embedding)
    model.load_state_dict(weights)
    return model.eval(), drafts


def export(kind: str, build: Path, target: Path, folder: Path) -> dict[str, Any]:
    """Writes one head and its card.

    Args:
        kind: "draft", "eagle" or "medusa".
        build: Folder of the training.
        target: Folder of the model that it drafts for.
        folder: Folder to write; created if missing.

    Returns:
        The card.
    """
    state = torch.load(build / "train" / f"{kind}.pt", map_location="cpu", weights_only=True)
    model = load_model(None, target)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in state["model"].items()}
    file = folder / "model.safetensors"
    save_file(weights, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    (folder / "config.json").write_text(json.dumps(config_of(kind, model.config), indent=2) + "\n")
    if kind == "draft":
        for name in COPIED:
            shutil.copyfile(target / name, folder / name)
    head, drafts = read_head(kind, folder, model)
    card = {
        "kind": kind,
        "parameters": sum(p.numel() for p in head.parameters()),
        "seed": state["seed"],
        "steps": state["step"],
        "tokens": state["tokens"],
        "digest": digest(file),
        "target_digest": digest(target / "model.safetensors"),
        "drafts_per_step": DEPTHS[kind],
        "acceptance": {name: acceptance(build / name, drafts, DEPTHS[kind]) for name in ("greedy", "sampled")},
    }
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    return card


def _rows(card: dict[str, Any]) -> list[str]:
    rows = []
    for group in card["acceptance"]["greedy"]:
        cells = []
        for name in ("greedy", "sampled"):
            figures = card["acceptance"][name][group]
            cells.append(", ".join(f"{share:.0%}" for share in figures["stand_by_position"]))
            cells.append(f"{figures['tokens_per_step']:.2f}")
        rows.append(f"| {TITLES[card['kind']]}, {group} | {' | '.join(cells)} |")
    return rows


def heads_section(cards: list[dict[str, Any]]) -> str:
    """The part of the model card about the heads."""
    lines = [
        HEADING,
        "",
        "For speculative decoding, made by `make leaf-heads` from this model's own answers. A step drafts as many",
        "tokens as there are shares in a cell; a draft stands if it and those before it are the tokens that this model",
        "gives. Shares of standing drafts by position, and tokens that a step yields (1 without drafts), on answers to",
        "held-out prompts (small talk: prompts of another seed), counted on the weights as they are here, in float32:",
        "",
        "| head | greedy | tokens a step | temperature 1 | tokens a step |",
        "| --- | --- | --- | --- | --- |",
        *[row for card in cards for row in _rows(card)],
        "",
        "| head | parameters | seed | steps | million tokens | SHA-256 of its model.safetensors |",
        "| --- | --- | --- | --- | --- | --- |",
        *[
            f"| `{card['kind']}/`: {TITLES[card['kind']]} | {card['parameters']:,} | {card['seed']} | {card['steps']} "
            f"| {card['tokens'] / 1e6:.1f} | `{card['digest']}` |"
            for card in cards
        ],
        "",
        f"They belong to the model.safetensors whose SHA-256 is `{cards[0]['target_digest']}`.",
        *[f"`{card['kind']}/`: {card['note']}" for card in cards if "note" in card],
        "",
    ]
    return "\n".join(lines)


def update_readme(readme: Path, section: str) -> None:
    """Replaces the last part of the card, which is about the heads, or adds it."""
    text = readme.read_text()
    begin = text.find(HEADING)
    readme.write_text((text if begin < 0 else text[:begin]).rstrip() + "\n\n" + section)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf-heads"))
    parser.add_argument("--target", type=Path, default=Path("quire/assets/leaf"))
    args = parser.parse_args()
    cards = [export(kind, args.out, args.target, args.target / kind) for kind in TRAINERS]
    size = sum(f.stat().st_size for kind in TRAINERS for f in (args.target / kind).iterdir())
    if size > SIZE_LIMIT:
        raise ValueError(f"the heads have {size} bytes, more than {SIZE_LIMIT}")
    update_readme(args.target / "README.md", heads_section(cards))
    print("\n".join(row for card in cards for row in _rows(card)))
    print(f"exported to {args.target}, {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
