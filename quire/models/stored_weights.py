"""What the weight files of a model hold, by their headers alone. Loads no torch.

Called by `quire inspect`. `check_weights` finds what shows there: files that are missing or cut off, layers that
config.json does not have, a vocabulary of another size. A start compares the names and shapes of all tensors. No state.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from quire.config.families.registry import family_of
from quire.config.model_arch import ModelArch
from quire.config.model_family import ModelFamily
from quire.errors import WeightsError
from quire.formats.gguf_file import GGUFFile, is_gguf
from quire.models.gguf.registry import gguf_family
from quire.models.safetensors_header import SafetensorsHeader
from quire.models.weight_files import check_index, find_weight_files, owners

TABLE, LAYER = "model.embed_tokens.weight", "model.layers.0.mixer_norm.weight"
TIED_HEAD = r"(^|\.)lm_head\.weight$"  # some checkpoints have it although it is the table
LEAST, MOST = 0.9, 1.05  # times the weights of projections and tables: keys that are values; convolutions and decays
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """The weights of a model as its files have them.

    Attributes:
        format: "safetensors" or "gguf".
        num_files, num_bytes: of weights.
        dtypes: type of numbers, as the format calls it -> bytes that are of it, the most first.
        shapes: tensor -> shape.
        num_parameters: numbers; 0 where several are packed into one.
    """

    format: str
    num_files: int
    num_bytes: int
    dtypes: Mapping[str, int]
    num_parameters: int
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)


def read_weights(path: Path) -> StoredWeights:
    """Read the headers of a directory's safetensors files, or of a GGUF file.

    Raises:
        WeightsError: there are no weights that can be opened, or a file or index is malformed.
    """
    return _read_gguf(path) if is_gguf(path) else _read_safetensors(path)


def _read_gguf(path: Path) -> StoredWeights:
    file = GGUFFile(path)
    dtypes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        dtypes[tensor.format.name] += tensor.num_bytes
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    return StoredWeights(
        format="gguf", num_files=len(file.parts), num_bytes=file.size, dtypes=dict(dtypes.most_common()),
        num_parameters=sum(map(math.prod, shapes.values())), shapes=shapes,
    )  # fmt: skip


def _read_safetensors(path: Path) -> StoredWeights:
    expected_files, paths = find_weight_files(path)
    headers = [SafetensorsHeader(one) for one in paths]
    check_index(expected_files, {name: header.path for name, header in owners(headers).items()})
    entries = [entry for header in headers for entry in header.entries.values()]
    dtypes: Counter[str] = Counter()
    for entry in entries:
        dtypes[entry.dtype] += entry.end - entry.begin
    shapes = {entry.name: entry.shape for entry in entries}
    is_plain = set(dtypes) <= set(FLOATS)
    return StoredWeights(
        format="safetensors", num_files=len(headers), num_bytes=sum(header.size for header in headers),
        dtypes=dict(dtypes.most_common()), num_parameters=sum(map(math.prod, shapes.values())) if is_plain else 0,
        shapes=shapes,
    )  # fmt: skip


def check_weights(stored: StoredWeights, arch: ModelArch) -> None:
    """Hold names and shapes that the files have against the model's shape: its table of tokens, and its layers.

    Raises:
        WeightsError: they do not belong together.
    """
    family = _family(arch)
    if family is None:
        return  # a class of transformers knows its names, and is not loaded here
    table, layer = (_stored_name(name, family, arch) for name in (TABLE, LAYER))
    usual = family.prefixes[0]
    bare = table.removeprefix(usual)
    prefix = next((one for one in family.prefixes if one + bare in stored.shapes), None)
    if prefix is None:
        raise _unlike(f"lack the table of tokens, {usual + bare}", usual + bare)
    shape = stored.shapes[prefix + bare]
    if shape[:1] != (arch.vocab_size,):
        given = f"a vocabulary of {arch.vocab_size}"
        raise _unlike(f"have {prefix + bare} of shape {list(shape)}, config.json gives {given}", prefix + bare)
    needed = [name for name in stored.shapes if not any(re.search(one, name) for one in family.ignored_tensors)]
    _check_layers(needed, arch, prefix + layer[: layer.index("0.")].removeprefix(usual))
    if stored.num_parameters:
        _check_size(stored, needed, arch)


def _family(arch: ModelArch) -> type[ModelFamily] | None:
    """What names the tensors; None of a class of transformers."""
    if arch.gguf_architecture:
        return gguf_family(arch.gguf_architecture)
    return None if arch.config_json else family_of(arch.architecture)


def _check_layers(names: Sequence[str], arch: ModelArch, head: str) -> None:
    """See that there are tensors of each layer, and of no other; `head` is how their names begin."""
    pattern = re.compile(re.escape(head) + r"(\d+)\.")
    present = {int(found[1]) for name in names if (found := pattern.match(name))}
    missing, others = set(range(arch.num_layers)) - present, present - set(range(arch.num_layers))
    if missing:
        raise _unlike(f"lack layer {min(missing)} of the {arch.num_layers} in config.json", f"{head}{min(missing)}")
    if others:
        raise _unlike(f"have a layer {min(others)}, config.json has {arch.num_layers}", f"{head}{min(others)}")


def _check_size(stored: StoredWeights, names: Sequence[str], arch: ModelArch) -> None:
    """See that all matrices together are about as large as those of the model."""
    is_spare = re.compile(TIED_HEAD) if arch.tie_word_embeddings else None
    matrices = [name for name in names if len(stored.shapes[name]) > 1 and not (is_spare and is_spare.search(name))]
    num_stored = sum(math.prod(stored.shapes[name]) for name in matrices)
    num_expected = arch.num_layer_weights + arch.num_table_weights
    num_positions = arch.embedding.num_positions * arch.hidden_size
    if not LEAST * num_expected <= num_stored <= MOST * num_expected + num_positions:
        raise _unlike(f"have {num_stored} numbers in matrices, config.json gives {num_expected}", "weights")


def _stored_name(name: str, family: type[ModelFamily], arch: ModelArch) -> str:
    for pattern, replacement in family.names(arch):
        name = re.sub(pattern, replacement, name)
    return name


def _unlike(problem: str, field_name: str) -> WeightsError:
    return WeightsError(
        f"the weights {problem}",
        hint="config.json and the weights do not belong together; download all files of the checkpoint",
        field=field_name,
    )
