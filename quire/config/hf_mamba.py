"""The fields that describe selective state spaces in `config.json`, read into `MambaArch`. Called by families. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config.hf_config import MAX_HEADS, MAX_INTERMEDIATE_SIZE, read_hidden_size
from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import MambaArch, NormArch

MAX_STATE_SIZE = 256
MAX_CONV_SIZE = 8
DEFAULT_LENGTH = 1 << 15
"""Longest sequence, in tokens, where config.json names none: a state takes the same memory for any number of them."""


def read_recurrent_length(config: FieldReader) -> int:
    """Longest sequence of a model without attention."""
    return config.integer("max_position_embeddings", 1, MAX_POSITIONS, DEFAULT_LENGTH)


def read_inner_size(config: FieldReader, name: str) -> int:
    """Channels of the state space: a multiple of the hidden size, 2 by default."""
    return int(config.number(name, 0.0, 64.0, 2.0) * read_hidden_size(config))


def read_state_size(config: FieldReader, name: str, default: int) -> int:
    """Elements of the state of a channel."""
    return config.integer(name, 1, MAX_STATE_SIZE, default)


def read_conv_size(config: FieldReader, name: str) -> int:
    """Tokens of the convolution."""
    return config.integer(name, 2, MAX_CONV_SIZE, 4)


def read_time_step_rank(config: FieldReader, name: str) -> int:
    """Elements from which the time steps of Mamba 1 are projected; "auto" is a sixteenth of the hidden size."""
    if config.raw.get(name) in (None, "auto"):
        return -(-read_hidden_size(config) // 16)
    return config.integer(name, 1, MAX_INTERMEDIATE_SIZE)


def read_time_step_range(config: FieldReader, name: str = "time_step_limit") -> tuple[float, float]:
    """Least and largest time step; the largest may be infinite, in either of the ways that files write it."""
    given = config.raw.get(name)
    if given is None:
        return 0.0, float("inf")
    if not isinstance(given, (list, tuple)) or len(given) != 2:
        raise config.error(name, f"is {str(given)[:60]!r}", "it must be a list of two numbers")
    least, largest = (_number(config, name, value) for value in given)
    if not 0.0 <= least <= largest:
        raise config.error(name, f"is {str(given)[:60]!r}", "it must be a list of two numbers, the smaller first")
    return least, largest


def read_factors(config: FieldReader, name: str, count: int) -> tuple[float, ...]:
    """A list of so many numbers; ones when absent."""
    given = config.raw.get(name)
    if given is None:
        return (1.0,) * count
    if not isinstance(given, (list, tuple)) or len(given) != count:
        raise config.error(name, f"is {str(given)[:60]!r}", f"it must be a list of {count} numbers")
    return tuple(_number(config, name, value) for value in given)


def make_mamba2(
    config: FieldReader,
    *,
    inner_size: int,
    num_heads: tuple[str, int],
    head_size: str,
    groups: tuple[str, int],
    state: tuple[str, int],
    conv_size: str,
    norm: NormArch | None,
    has_bias: bool,
    conv_bias: bool,
    time_step_range: tuple[float, float],
) -> MambaArch:
    """A mixer of Mamba 2, after checking that heads and groups divide.

    Args:
        num_heads, groups, state: name of the field, and what its absence means.
        head_size, conv_size: name of the field; "auto" or absence means the heads that divide `inner_size`, and 4.
    """
    heads = config.integer(num_heads[0], 1, MAX_HEADS, num_heads[1])
    if inner_size % heads:
        raise config.error(
            num_heads[0], f"is {heads}, which does not divide the {inner_size} channels", "correct it or the expansion"
        )
    size = inner_size // heads
    given = size if config.raw.get(head_size) in (None, "auto") else config.integer(head_size, 1, MAX_INTERMEDIATE_SIZE)
    if given != size:
        raise config.error(
            head_size, f"is {given}, but {inner_size} channels in {heads} heads are {size}", "correct one"
        )
    num_groups = config.integer(groups[0], 1, MAX_HEADS, groups[1])
    if heads % num_groups:
        raise config.error(groups[0], f"is {num_groups}, which does not divide {num_heads[0]} ({heads})", "correct one")
    return MambaArch(
        version=2,
        inner_size=inner_size,
        state_size=read_state_size(config, *state),
        conv_size=read_conv_size(config, conv_size),
        num_heads=heads,
        head_size=size,
        num_groups=num_groups,
        time_step_range=time_step_range,
        conv_bias=conv_bias,
        projection_bias=has_bias,
        gated_norm=norm,
    )


def layer_kinds(config: FieldReader, names: Sequence[str], num_layers: int | None, known: Sequence[str]) -> list[str]:
    """What each layer is, from the first of the fields that is there: "mamba", "attention" or another word of `known`.

    transformers 5 calls the first two "linear_attention" and "full_attention".
    """
    name = next((name for name in names if config.has(name)), names[0])
    words = {"linear_attention": "mamba", "full_attention": "attention"}
    kinds = [words.get(kind, kind) for kind in config.texts(name)]
    if num_layers is not None and len(kinds) != num_layers:
        raise config.error(name, f"names {len(kinds)} layers", f"num_hidden_layers is {num_layers}")
    for kind in kinds:
        if kind not in known:
            raise config.error(name, f"has {kind[:40]!r}", f"known: {', '.join(known)}")
    return kinds


def _number(config: FieldReader, name: str, value: object) -> float:
    if isinstance(value, dict) and set(value) == {"__float__"}:  # how transformers writes what JSON has no number for
        value = value["__float__"]
        if value in ("Infinity", "inf"):
            return float("inf")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise config.error(name, f"has {str(value)[:40]!r}", "each must be a number")
    return float(value)
