"""Exports the trained network as a Hugging Face style folder with a model card.

`python -m training.export` reads checkpoint.pt, the weights at the ends of the cycles before the last, scores.json (if
the evaluation saved one) and the tokenizer from the build folder, and writes quire/assets/leaf/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training import card
from training.mixture import CYCLE_SHARES
from training.model import LeafConfig
from training.tokenizer import END_OF_TEXT, IM_END
from training.train import cycle_file

SIZE_LIMIT = 20 * 2**20  # bytes
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def hf_config(config: LeafConfig) -> dict:
    """The contents of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rope_scaling": None,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        **config.to_dict(),
    }


def digest(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def mean_weights(checkpoint: Path, last: dict[str, Tensor], shares: tuple[float, ...]) -> dict[str, Tensor]:
    """The mean of the weights at the ends of all cycles.

    Args:
        checkpoint: Of the trainer.
        last: The weights at the end of the last cycle.
        shares: Of each cycle's weights in the mean, 1 together.
    """
    mean = {name: shares[-1] * weight for name, weight in last.items()}
    for number, share in enumerate(shares[:-1], 1):
        for name, weight in torch.load(cycle_file(checkpoint, number), map_location="cpu", weights_only=True).items():
            mean[name] += share * weight
    return mean


def export(build: Path, target: Path, note: str = "", shares: tuple[float, ...] = (1.0,)) -> int:
    """Writes all files of the model.

    Args:
        build: Folder with checkpoint.pt, the tokenizer files and perhaps scores.json.
        target: Folder to write; created if missing.
        note: What the model card should say about this run in particular.
        shares: As of `mean_weights`.

    Returns:
        Total size of the files, in bytes.

    Raises:
        ValueError: If the files together are larger than SIZE_LIMIT.
    """
    state = torch.load(build / "checkpoint.pt", map_location="cpu", weights_only=True)
    config = LeafConfig(**state["config"])
    target.mkdir(parents=True, exist_ok=True)
    mean = mean_weights(build / "checkpoint.pt", state["model"], shares)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in mean.items()}
    file = target / "model.safetensors"
    save_file(weights, str(file), metadata={"format": "pt"})
    file.chmod(0o644)
    (target / "config.json").write_text(json.dumps(hf_config(config), indent=2) + "\n")
    for name in COPIED:
        shutil.copyfile(build / name, target / name)
    scores_file = build / "scores.json"
    scores = json.loads(scores_file.read_text()) if scores_file.exists() else None
    parameters = sum(v.numel() for v in weights.values())
    (target / "README.md").write_text(card.model_card(config, parameters, state, scores, digest(file), note))
    size = sum(f.stat().st_size for f in target.iterdir() if f.is_file())
    if size > SIZE_LIMIT:
        raise ValueError(f"{target} has {size} bytes, more than {SIZE_LIMIT}")
    return size


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/leaf"), help="folder of the trainer")
    parser.add_argument("--target", type=Path, default=Path("quire/assets/leaf"))
    parser.add_argument("--note", default="", help="a sentence about this run for the model card")
    args = parser.parse_args()
    size = export(args.out, args.target, args.note, CYCLE_SHARES)
    print(f"exported to {args.target}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
