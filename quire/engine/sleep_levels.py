"""Levels, modes and tags of sleep, as in vLLM, and the files whose cached pages the last level drops. No state."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from quire import envs
from quire.config import QuireConfig
from quire.errors import QuireError, ValidationError
from quire.models.weight_files import find_weight_files

LEVELS = (0, 1, 2)
MODES = ("abort", "wait", "keep")
WEIGHTS, KV_CACHE, SCHEDULING = "weights", "kv_cache", "scheduling"
TAGS = (WEIGHTS, KV_CACHE, SCHEDULING)
MEMORY = frozenset({WEIGHTS, KV_CACHE})


@dataclass(slots=True)
class SleepState:
    """What an engine lacks.

    Attributes:
        level: of the last `sleep`; 0 = steps are paused, and nothing was given back.
        tags: of `TAGS`, what has to be woken up.
    """

    level: int = 0
    tags: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """As vLLM's metric calls it."""
        if not self.tags & MEMORY:
            return "awake"
        return "weights_offloaded" if self.level == 1 else "discard_all"


def check_sleep(level: int, mode: str) -> None:
    """Raise `ValidationError` when there is no such level or mode."""
    for name, value, choices in (("level", level, LEVELS), ("mode", mode, MODES)):
        if value not in choices:
            raise ValidationError(
                f"{name}={str(value)[:40]} is unknown", hint=f"valid: {', '.join(map(str, choices))}", field=name
            )


def check_tags(tags: Collection[str] | None) -> None:
    """Raise `ValidationError` when there is no such tag."""
    for tag in tags or ():
        if tag not in TAGS:
            raise ValidationError(f"unknown tag {str(tag)[:40]!r}", hint=f"valid: {', '.join(TAGS)}", field="tags")


def weight_files(config: QuireConfig) -> list[Path]:
    """That a core reads when it starts: of the model, and packed ones."""
    cache = envs.cache_dir()
    packed = [] if cache is None else sorted((cache / "packed").glob("*"))
    try:
        return [*find_weight_files(Path(config.model_path))[1], *packed]
    except QuireError:  # dummy weights have no files
        return packed


def drop_cached_pages(paths: Iterable[str | os.PathLike[str]]) -> None:
    """Have the operating system forget what it keeps of these files; harmless where it does not."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
