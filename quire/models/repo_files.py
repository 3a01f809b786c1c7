"""Which files of a model repository belong to a choice such as `org/repo:Q4_K_M`.

Called where a model is downloaded, and where one is looked up in the cache or in a directory: both read the same files.
Pure: it sees the names of files alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from quire.errors import ModelError

# Descriptions, tokenizers and chat templates, beside safetensors weights: nothing that could run code.
DESCRIPTIONS = ("*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
NEVER = ("*.py", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SINGLE_WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
DEFAULT_QUANT = "Q4_K_M"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}(/[A-Za-z0-9_][\w.\-]{0,95})?", re.ASCII)
QUANT = re.compile(r"[\w.\-]{1,200}", re.ASCII)
SPLIT_SUFFIX = re.compile(r"-(\d{5})-of-(\d{5})$")
QUANT_NAME = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_[0-9A-Z]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?))(?=$|[-._])", re.IGNORECASE
)
# GGUF files that are not language models: projectors of images, statistics of a quantization.
OTHER_GGUF = re.compile(r"^mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RepoChoice:
    """The files of one model.

    Attributes:
        paths: within the repository, in order.
        gguf: the GGUF file, of several the first; None = a directory in Hugging Face format.
    """

    paths: tuple[str, ...]
    gguf: str | None = None


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF model of a repository: one file, or the parts of a split one.

    Attributes:
        name: of the file, without the part's number.
        quant: how its file name says it is quantized, in capitals; "" = not said.
        paths: in order.
        num_parts: that it should have.
    """

    name: str
    quant: str
    paths: tuple[str, ...]
    num_parts: int


def checked_name(model: str) -> tuple[str, str | None]:
    """The repository and the quantization that "org/name" or "org/name:QUANT" names.

    Raises:
        ModelError: it is not such a name.
    """
    repo, colon, name = model.partition(":")
    quant = name if colon else None
    is_name = HUB_ID.fullmatch(repo) and ".." not in repo and "--" not in repo
    if not is_name or (quant is not None and not QUANT.fullmatch(quant)):
        raise ModelError(
            f"model {model[:200]!r} is not the name of a model on the hub",
            hint="such as Qwen/Qwen3-0.6B, or ORG/REPO:Q4_K_M for a GGUF file", field="model",
        )  # fmt: skip
    return repo, quant


def choose_files(repo: str, paths: Iterable[str], quant: str | None = None) -> RepoChoice:
    """The files to download and to read.

    Without `quant` these are the safetensors weights and what describes them; of a repository of GGUF files alone, the
    Q4_K_M ones, or the only ones.

    Args:
        repo: the repository's name or directory, for messages.
        paths: of all files.
        quant: a quantization such as "Q4_K_M", or the name of a GGUF file.

    Raises:
        ModelError: there are no such files, or several models of this quantization; names those that there are.
    """
    names = sorted(paths)
    models = gguf_models(names)
    if quant is not None:
        return _gguf_choice(repo, models, quant)
    weights = _safetensors(names)
    if weights or not models:
        return _directory_choice(repo, names, weights)
    return _gguf_choice(repo, models, None)


def included_files(repo: str, paths: Iterable[str], patterns: Sequence[str]) -> RepoChoice:
    """The files that match one of `patterns`, such as "*.json", whatever they are.

    Raises:
        ModelError: there are none.
    """
    names = sorted(paths)
    chosen = tuple(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))
    if not chosen:
        raise ModelError(
            f"{repo} has no file that matches {', '.join(patterns)}", hint=f"it has {_some(names)}", field="include"
        )
    return RepoChoice(chosen)


def gguf_models(paths: Iterable[str]) -> list[GgufModel]:
    """The GGUF language models among the files, parts of split ones together."""
    parts: dict[str, list[str]] = {}
    nums: dict[str, int] = {}
    for path in sorted(paths):
        stem, dot, suffix = path.rpartition(".")
        if not dot or suffix.lower() != "gguf" or OTHER_GGUF.search(path.rpartition("/")[2]):
            continue
        split = SPLIT_SUFFIX.search(stem)
        name = stem[: split.start()] if split else stem
        key = f"{name} of {split[2]}" if split else name
        parts.setdefault(key, []).append(path)
        nums[key] = int(split[2]) if split else 1
    return [
        GgufModel(_model_name(found[0]), quant_of(found[0]), tuple(found), nums[key]) for key, found in parts.items()
    ]


def models_of_quant(models: Iterable[GgufModel], quant: str) -> list[GgufModel]:
    """Those of a quantization, or the one whose file has this name."""
    candidates, wanted = list(models), _normal(quant)
    named = [model for model in candidates if wanted in (_normal(path.rpartition("/")[2]) for path in model.paths)]
    return named or [model for model in candidates if model.quant == wanted]


def quant_of(path: str) -> str:
    """The quantization that a GGUF file's name says, in capitals; "" = none."""
    found = QUANT_NAME.findall(_model_name(path))
    return _normal(found[-1]) if found else ""


def missing_parts(model: GgufModel) -> list[str]:
    """Names of the parts that a split model lacks."""
    if model.num_parts == 1:
        return []
    stem = SPLIT_SUFFIX.sub("", model.paths[0].rpartition(".")[0])
    names = [f"{stem}-{i:05d}-of-{model.num_parts:05d}.gguf" for i in range(1, model.num_parts + 1)]
    return [name for name in names if name not in model.paths]


def _gguf_choice(repo: str, models: Sequence[GgufModel], quant: str | None) -> RepoChoice:
    found = models_of_quant(models, DEFAULT_QUANT if quant is None else quant)
    if quant is None and not found and len(models) == 1:
        found = list(models)
    if len(found) != 1:
        raise _not_one(repo, models, found, quant)
    (model,) = found
    if missing := missing_parts(model):
        raise ModelError(
            f"{repo} lacks {_some(missing)} of {model.name}", hint="all parts of a split model are needed",
            field="model",
        )  # fmt: skip
    return RepoChoice(model.paths, gguf=model.paths[0])


def _not_one(repo: str, models: Sequence[GgufModel], found: Sequence[GgufModel], quant: str | None) -> ModelError:
    choices = _some(sorted({model.quant or model.name for model in models}), 40)
    if not models:
        return ModelError(f"{repo} has no GGUF file", hint=f"leave out :{quant}", field="model")
    if found:
        files = _some([model.paths[0].rpartition("/")[2] for model in found])
        problem, hint = f"{repo} has several models of {found[0].quant}: {files}", "name the file: ORG/REPO:FILE.gguf"
    elif quant is None:
        problem, hint = f"{repo} has no {DEFAULT_QUANT} file, which is the default", f"name one of {choices}"
    else:
        problem, hint = f"{repo} has no GGUF file of quantization {quant[:60]!r}", f"it has {choices}"
    return ModelError(problem, hint=hint, field="model")


def _directory_choice(repo: str, names: Sequence[str], weights: Sequence[str]) -> RepoChoice:
    if not weights:
        others = [name for name in names if any(fnmatch(name, pattern) for pattern in NEVER[1:])]
        problem = f"{repo} has no .safetensors file" + (
            f", only {_some(others)}, which Quire does not open" if others else ""
        )
        raise ModelError(problem, hint="look for a repository with safetensors or GGUF files", field="model")
    return RepoChoice((*descriptions(names), *weights))


def descriptions(names: Iterable[str]) -> list[str]:
    """Those of the files that describe a model in Hugging Face format: its configuration, tokenizer, chat template."""
    return [
        name
        for name in names
        if "/" not in name
        and any(fnmatch(name, pattern) for pattern in DESCRIPTIONS)
        and not any(fnmatch(name, pattern) for pattern in NEVER)
    ]


def _safetensors(names: Sequence[str]) -> list[str]:
    """The weights that are read: one file if it is the usual one, else those of the index, which is not read here."""
    found = [name for name in names if fnmatch(name, "*.safetensors") and "/" not in name]
    if SINGLE_WEIGHTS in found and WEIGHTS_INDEX not in names:
        return [SINGLE_WEIGHTS]
    return [name for name in found if not name.startswith("consolidated")]


def _model_name(path: str) -> str:
    stem = path.rpartition("/")[2].rpartition(".")[0]
    return SPLIT_SUFFIX.sub("", stem)


def _normal(quant: str) -> str:
    return re.sub(r"^FP(?=16$|32$)", "F", quant.upper())


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(name[:120] for name in names[:most]) + (", ..." if len(names) > most else "")
