"""What a directory with heads says about itself: its config.json, checked against the target's shape. No state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from quire.config.hf_fields import FieldReader
from quire.config.model_arch import ModelArch
from quire.errors import ConfigError, ModelError
from quire.models.model_dir import read_model_dir

FIELD = "speculative_config"


def read_head_config(path: Path) -> dict[str, object]:
    """The object in config.json of the heads in `path`; that of some older ones lies in its field `model`.

    Raises:
        ModelError: there is none.
    """
    config = read_model_dir(path).config
    inner = config.get("model")
    return inner if isinstance(inner, dict) else config


def check_sizes(config: Mapping[str, object], target: ModelArch) -> None:
    """Refuse heads of another target; fields that are absent say nothing.

    Raises:
        ConfigError: names the field, and both values.
    """
    for name, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        given = config.get(name)
        if given is not None and given != size:
            raise ConfigError(
                f"{FIELD}: the heads were made for a model with {name}={given!r}, this one has {size}",
                hint="use heads that were trained for this very model", field=FIELD,
            )  # fmt: skip


def read_count(config: Mapping[str, object], names: tuple[str, ...], default: int, most: int) -> int:
    """A number from 1 to `most` under the first of these names that is there.

    Raises:
        ModelError: it is no such number.
    """
    reader = FieldReader(config)
    name = next((name for name in names if config.get(name) is not None), names[0])
    return reader.integer(name, 1, most, default)


def wrong_heads(message: str, hint: str) -> ModelError:
    """The error for heads that cannot be computed."""
    return ModelError(f"{FIELD}: {message}", hint=hint, field=FIELD)
