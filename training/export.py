"""Exports the trained network as a Hugging Face style folder with a model card.

`python -m training.export` reads checkpoint.pt (and scores.json, if the evaluation
saved one) and the tokenizer from the build folder, and writes quire/assets/leaf/.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from training import card
from training.model import LeafConfig
from training.tokenizer import END_OF_TEXT, IM_END

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


def export(build: Path, target: Path, note: str = "") -> int:
    """Writes all files of the model.

    Args:
        build: Folder with checkpoint.pt, the tokenizer files and perhaps scores.json.
        target: Folder to write; created if missing.
        note: What the model card should say about this run in particular.

    Returns:
        Total size of the files, in bytes.

    Raises:
        ValueError: If the files together are larger than SIZE_LIMIT.
    """
    state = torch.load(build / "checkpoint.pt", map_location="cpu", weights_only=True)
    config = LeafConfig(**state["config"])
    target.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in state["model"].items()}
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
    size = export(args.out, args.target, args.note)
    print(f"exported to {args.target}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
