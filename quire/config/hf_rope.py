"""The rotary embedding of a `config.json`, in the transformers 4 and 5 styles, as one `RopeConfig`.

Called by the families (`config.families`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.hf_fields import FieldReader

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
MAX_POSITIONS = 1 << 24
MAX_FACTOR = 65536.0
DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        rope_type: one of `ROPE_TYPES`.
        theta: base of the frequencies.
        rotary_dim: leading elements of each head that are rotated.
        parameters: the variant's own numbers (factor, low_freq_factor, original_max_position_embeddings, ...).
        short_factors, long_factors: of longrope: what each pair's frequency is divided by.
        is_interleaved: pairs are neighbours (GPT-J), not elements half of `rotary_dim` apart; checkpoints' rows are
            reordered when they are loaded.
    """

    rope_type: str = "default"
    theta: float = DEFAULT_THETA
    rotary_dim: int = 0
    parameters: tuple[tuple[str, float], ...] = ()
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_interleaved: bool = False


def parse_rope(
    config: FieldReader, head_size: int, max_positions: int, *, kind: str | None = None
) -> tuple[RopeConfig, int]:
    """The rotary embedding and the longest sequence it serves.

    transformers 4 writes `rope_theta` and `rope_scaling` (whose kind is "type" or "rope_type"), transformers 5 one
    object `rope_parameters`. The longest sequence is `max_positions`, except that `linear` and `dynamic` multiply it
    by their factor and `yarn` gives factor * original_max_position_embeddings. That is how vLLM reads these fields;
    transformers itself sets no limit.

    Args:
        max_positions: `max_position_embeddings` as written.
        kind: of layers, as `layer_types` has it, in families whose `rope_parameters` may hold an object per kind.

    Raises:
        ModelError: an unknown kind, or a number that is missing, contradictory or out of range.
    """
    rope = _rope_object(config, kind)
    rope_type = _rope_type(rope)
    default_theta = config.number("rope_theta", 2.0, 1e15, DEFAULT_THETA)
    theta = rope.number("rope_theta", 2.0, 1e15, default_theta)
    parameters = _parameters(config, rope, rope_type, max_positions)
    # Proportional: every pair is rotated, those past the share by an angle of 0.
    rotary_dim = _rotary_dim(config, rope, head_size, 1.0 if rope_type == "proportional" else None)
    is_long, num_pairs = rope_type == "longrope", rotary_dim // 2
    parsed = RopeConfig(
        rope_type=rope_type,
        theta=theta,
        rotary_dim=rotary_dim,
        parameters=tuple(sorted(parameters.items())),
        short_factors=rope.numbers("short_factor", num_pairs, 1e-3, MAX_FACTOR) if is_long else (),
        long_factors=rope.numbers("long_factor", num_pairs, 1e-3, MAX_FACTOR) if is_long else (),
    )
    return parsed, _longest_sequence(rope, rope_type, parameters, max_positions)


def parse_rope_of_windows(
    config: FieldReader, head_size: int, max_positions: int, theta: float
) -> tuple[RopeConfig, int]:
    """The rotary embedding of layers with windows, in families where only the other layers have scaling.

    Args:
        theta: without one in `rope_parameters`.
    """
    parameters = config.raw.get("rope_parameters")
    kinds = parameters if isinstance(parameters, Mapping) and "sliding_attention" in parameters else None
    own = FieldReader({**config.raw, "rope_theta": theta, "rope_scaling": None, "rope_parameters": kinds})
    return parse_rope(own, head_size, max_positions, kind="sliding_attention")


def _rope_object(config: FieldReader, kind: str | None) -> FieldReader:
    scaling, parameters = config.optional_object("rope_scaling"), config.optional_object("rope_parameters")
    if scaling is not None and parameters is not None and scaling.raw != parameters.raw:
        raise config.error("rope_scaling", "and rope_parameters are both set and differ", "keep one of the two")
    found = parameters or scaling or FieldReader({}, config.source)
    if kind is not None and isinstance(found.raw.get(kind), Mapping):
        found = FieldReader(found.raw[kind], f"{found.source}: {kind}")  # type: ignore[arg-type]
    if any(isinstance(value, dict) for value in found.raw.values()):
        raise config.error("rope_parameters", "differ per kind of layer", "only one rotary embedding for all layers")
    return found


def _rope_type(rope: FieldReader) -> str:
    name = "rope_type" if rope.has("rope_type") else "type"
    if name == "type" and not rope.has("type") and rope.has("factor"):
        raise rope.error("rope_type", "is missing", f"add it: one of {', '.join(ROPE_TYPES)}")
    if rope.raw.get(name) == "su":
        return "longrope"  # its name in the first checkpoints
    return rope.text(name, ROPE_TYPES, "default")


def _share(config: FieldReader, rope: FieldReader) -> float:
    return rope.number("partial_rotary_factor", 0.0, 1.0, config.number("partial_rotary_factor", 0.0, 1.0, 1.0))


def _rotary_dim(config: FieldReader, rope: FieldReader, head_size: int, share: float | None) -> int:
    share = _share(config, rope) if share is None else share
    rotary_dim = int(head_size * share)
    if rotary_dim < 4 or rotary_dim % 2:
        raise config.error(
            "head_dim", f"gives {rotary_dim} rotated elements per head", "it must be an even number, 4 or more"
        )
    return rotary_dim


def _parameters(config: FieldReader, rope: FieldReader, rope_type: str, max_positions: int) -> dict[str, float]:
    if rope_type == "default":
        return {}
    if rope_type == "linear":
        return {"factor": rope.number("factor", 1.0, MAX_FACTOR)}
    if rope_type == "dynamic":
        return {"factor": rope.number("factor", 1.0, MAX_FACTOR), "original_max_position_embeddings": max_positions}
    if rope_type == "proportional":
        return {"factor": rope.number("factor", 1.0, MAX_FACTOR, 1.0), "share": _share(config, rope)}
    original = config.optional_integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    if original is None:
        original = rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_positions)
    if rope_type == "llama3":
        return _llama3_parameters(rope, original)
    if rope_type == "longrope":
        return _longrope_parameters(rope, original, max_positions)
    return _yarn_parameters(rope, original, max_positions)


def _llama3_parameters(rope: FieldReader, original: int) -> dict[str, float]:
    low, high = rope.number("low_freq_factor", 1e-6, 1e6), rope.number("high_freq_factor", 1e-6, 1e6)
    if not low < high:
        raise rope.error("high_freq_factor", f"is {high:g}", f"it must be above low_freq_factor, which is {low:g}")
    return {
        "factor": rope.number("factor", 1.0, MAX_FACTOR),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope_parameters(rope: FieldReader, original: int, max_positions: int) -> dict[str, float]:
    if original < 2:
        raise rope.error("original_max_position_embeddings", f"is {original}", "the length the model was trained with")
    parameters = {
        "factor": rope.number("factor", 1e-3, MAX_FACTOR, max_positions / original),
        "original_max_position_embeddings": original,
    }
    for name in ("attention_factor", "short_mscale", "long_mscale"):
        value = rope.optional_number(name, 0.0, 1e4)
        if value is not None:
            parameters[name] = value
    return parameters


def _yarn_parameters(rope: FieldReader, original: int, max_positions: int) -> dict[str, float]:
    beta_fast, beta_slow = rope.number("beta_fast", 0.0, 1e6, 32.0), rope.number("beta_slow", 0.0, 1e6, 1.0)
    parameters = {
        "factor": rope.number("factor", 1.0, MAX_FACTOR, max(1.0, max_positions / original)),
        "original_max_position_embeddings": original,
        "beta_fast": beta_fast or 32.0,
        "beta_slow": beta_slow or 1.0,
        "truncate": float(rope.flag("truncate", True)),
    }
    if not parameters["beta_fast"] >= parameters["beta_slow"]:
        raise rope.error("beta_fast", f"is {beta_fast:g}", f"it must be at least beta_slow, which is {beta_slow:g}")
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        value = rope.optional_number(name, 0.0, 1e4)
        if value is not None:
            parameters[name] = value
    return parameters


def _longest_sequence(rope: FieldReader, rope_type: str, parameters: dict[str, float], max_positions: int) -> int:
    if rope_type in ("default", "llama3", "longrope", "proportional"):
        return max_positions
    before = parameters["original_max_position_embeddings"] if rope_type == "yarn" else max_positions
    longest = int(before * parameters["factor"])
    if longest > MAX_POSITIONS:
        raise rope.error("factor", f"makes sequences of {longest} tokens", f"at most {MAX_POSITIONS} tokens")
    return longest
