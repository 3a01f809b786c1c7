"""Models in the files that people have (GGUF, 4-bit checkpoints), and the same numbers as plain float32 checkpoints.

Used by the suites that run on such files, too: parity, same bits, the feature matrix, structured output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from quire.models.hub import resolve_model_path
from tests.models.awq_files import make_awq, make_gptq
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import Numbers, add_byte_level_bpe, make_gguf, write_plain

# Rows are of whole blocks of 256, so that K-quants are what is asked for.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def _gguf(types: str, checkpoint: Path, directory: Path) -> tuple[Path, Numbers]:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "model.gguf"
    return path, make_gguf(checkpoint, path, types)


def _awq(checkpoint: Path, directory: Path) -> tuple[Path, Numbers]:
    return directory, make_awq(checkpoint, directory)


def _gptq(checkpoint: Path, directory: Path) -> tuple[Path, Numbers]:
    return directory, make_gptq(checkpoint, directory, group_size=64, has_act_order=True)


KINDS: Mapping[str, Callable[[Path, Path], tuple[Path, Numbers]]] = {
    "gguf": partial(_gguf, "every type"),
    "awq": _awq,
    "gptq": _gptq,
}
"""Kind of file -> what makes one: (checkpoint, directory) -> what is served, and the numbers that it means."""

LEAF_KINDS = ("Q4_K_M", "awq")
"""What `make_leaf` makes for suites with a model that writes sentences."""


def make_tiny(kind: str, directory: Path) -> tuple[Path, Path]:
    """A tiny Llama 3 with random weights: what is served, and the plain checkpoint with the same numbers."""
    make_checkpoint("llama3", directory / "checkpoint", **SIZES)
    served, numbers = KINDS[kind](directory / "checkpoint", directory / "served")
    return served, write_plain(directory / "checkpoint", numbers, directory / "plain")


def make_leaf(kind: str, directory: Path) -> Path:
    """The embedded model as a GGUF file of a type or mix, or as an AWQ checkpoint ("awq")."""
    leaf = Path(resolve_model_path("leaf", None, None))
    path = directory / (f"leaf-{kind}" if kind == "awq" else f"leaf-{kind}.gguf")
    if kind == "awq":
        make_awq(leaf, path)
    else:  # its words are cut as GPT-2's are, and every digit is one
        make_gguf(leaf, path, kind, add_tokenizer=partial(add_byte_level_bpe, pre="starcoder"))
    return path
