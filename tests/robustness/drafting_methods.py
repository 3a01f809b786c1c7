"""Every method of drafting as settings of an engine, with drafters that are often right and often wrong.

Models that draft are made from the target: heads fitted to texts (`tests.models.fitted_heads`), a copy with noise as
the draft model. Where weights are random, the target drafts for itself: it is right where requests are greedy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest import mock

from quire.config.families.qwen import Qwen2
from quire.models.hub import resolve_model_path
from quire.tokenization.tokenizer import load_tokenizer
from tests.models import fitted_heads
from tests.robustness.ships_heads import PATTERNS
from training.corpus.registry import held_out_samples
from training.export import digest
from training.tokenizer import render

ORACLE = "oracle"
NUM_OF_MODEL = 3  # drafts
MAX_TEXTS, MAX_TEXT_TOKENS = 150, 500
TASKS = ("sums", "story_questions", "extraction", "tool_calls", "two_tool_calls", "thinking", "copying")


@dataclass(frozen=True)
class Target:
    """A model to draft for.

    Attributes:
        directory: of its config.json; its weights may be missing.
        settings: what chooses it.
        num_medusa_heads: fewer where words are many.
        longest_prompt: of requests that are plain texts, in tokens.
    """

    directory: Path
    settings: Mapping[str, Any]
    num_medusa_heads: int = NUM_OF_MODEL
    longest_prompt: int | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        config: dict[str, Any] = json.loads((self.directory / "config.json").read_text())
        return config


class Drafters:
    """What drafts for a target.

    Args:
        directory: where models that draft are, and are written when they are first needed.
        texts: token ids that the target reads and writes; heads are fitted to them.
    """

    def __init__(self, target: Target, directory: Path, texts: Sequence[Sequence[int]]) -> None:
        self.target = target
        self._directory = directory
        self._texts = texts
        directory.mkdir(parents=True, exist_ok=True)

    @cached_property
    def states(self) -> fitted_heads.States:
        """The target's, of the texts."""
        texts = [text[:MAX_TEXT_TOKENS] for text in self._texts[:MAX_TEXTS]]
        return fitted_heads.states_of(texts, self.target.config, **self.target.settings)

    def settings(self, method: str, *, is_controlled: bool = False) -> dict[str, Any]:
        """Of an engine that drafts whenever it may, or as the controller says."""
        make = ALL_METHODS[method]
        if make is None:
            return {}
        settings = make(self)
        settings["speculative_config"]["enable_adaptive_verification"] = is_controlled
        return settings

    @cached_property
    def _target_digest(self) -> str:
        """Of the target's weights; random ones follow from its configuration."""
        file = self.target.directory / "model.safetensors"
        return digest(file)[:12] if file.exists() else "random"

    def model(self, name: str, write: Callable[[Path], Path]) -> str:
        """A directory of this name, which `write` fills; another target's is another one."""
        path = self._directory / self._target_digest / name
        if not (path / "model.safetensors").exists():
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        return str(path)


def _history(**fields: Any) -> Callable[[Drafters], dict[str, Any]]:
    return lambda drafters: {"speculative_config": dict(fields)}


def _of_model(method: str | list[str], model: str) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "model": model, "num_speculative_tokens": NUM_OF_MODEL}}


def _draft_model(drafters: Drafters) -> dict[str, Any]:
    source = drafters.target.directory
    if not (source / "model.safetensors").exists():
        return _of_model("draft_model", str(source))
    return _of_model("draft_model", drafters.model("disturbed", lambda to: fitted_heads.write_disturbed(to, source)))


def _eagle(drafters: Drafters, method: str | list[str] = "eagle") -> dict[str, Any]:
    def write(to: Path) -> Path:
        return fitted_heads.write_eagle(to, drafters.states, drafters.target.config)

    return _of_model(method, drafters.model("eagle", write))


def _eagle3(drafters: Drafters) -> dict[str, Any]:
    def write(to: Path) -> Path:
        return fitted_heads.write_eagle3(to, drafters.states, drafters.target.config)

    return _of_model("eagle3", drafters.model("eagle3", write))


def _medusa(drafters: Drafters) -> dict[str, Any]:
    def write(to: Path) -> Path:
        target = drafters.target
        return fitted_heads.write_medusa(to, drafters.states, target.config, target.num_medusa_heads)

    return _of_model("medusa", drafters.model("medusa", write))


def _trees(
    of_chains: Callable[[Drafters], dict[str, Any]], tree: str = "[(0,), (1,), (0, 0), (1, 0), (0, 1), (1, 0, 0)]"
) -> Callable[[Drafters], dict[str, Any]]:
    def settings(drafters: Drafters) -> dict[str, Any]:
        found = of_chains(drafters)
        del found["speculative_config"]["num_speculative_tokens"]
        found["speculative_config"]["speculative_token_tree"] = tree
        return found

    return settings


def _mtp(drafters: Drafters) -> dict[str, Any]:
    def write(to: Path) -> Path:
        return fitted_heads.write_with_mtp(to, drafters.states, drafters.target.directory)

    speculation = {"method": "mtp", "num_speculative_tokens": NUM_OF_MODEL}
    return {"model": drafters.model("mtp", write), "speculative_config": speculation}


METHODS: dict[str, Callable[[Drafters], dict[str, Any]] | None] = {
    ORACLE: None,  # which has seen the answers
    "ngram": _history(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3),
    "suffix": _history(method="suffix"),
    "draft_model": _draft_model,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "medusa": _medusa,
    "mtp": _mtp,
    "suffix, else eagle": lambda drafters: _eagle(drafters, ["suffix", "eagle"]),
}
"""Method -> settings of an engine; a method joins by a line."""

ALL_METHODS = {
    **METHODS,
    "medusa, trees": _trees(_medusa, "[(0,), (1,), (0, 0)]"),
    "eagle, trees": _trees(_eagle),
    "eagle3, trees": _trees(_eagle3),
}
"""With ways of using one, which `make test-speculation` tries besides."""


@cache
def leaf_texts() -> list[list[int]]:
    """Texts of the kinds that `leaf` knows, as token ids."""
    tokenizer = load_tokenizer(resolve_model_path("leaf", None, None))
    samples = [sample for task in TASKS for sample in held_out_samples(task, 8)]
    texts = ("".join(text for text, _ in render(sample)) for sample in samples)
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


@contextmanager
def shipping_heads() -> Iterator[None]:
    """Checkpoints of families that ship no head may have one."""
    with mock.patch.object(Qwen2, "ignored_tensors", PATTERNS):
        yield
