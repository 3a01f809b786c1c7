"""The rotary embedding of a GGUF file, as the fields that config.json has for it. Called by `family`. Pure.

Source: llama.cpp, gguf-py/gguf/constants.py (class Rope) and conversion/*.py, for what converters write.
"""

from __future__ import annotations

from quire.models.gguf.metadata import Metadata

SCALING_TYPES = ("none", "linear", "yarn", "longrope")
FREQUENCIES, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQUENCIES, LONG_FACTORS, SHORT_FACTORS)


def rope_fields(metadata: Metadata, head_size: int) -> dict[str, object]:
    """`rope_theta`, `rope_scaling`, `partial_rotary_factor` and what belongs to them.

    Args:
        head_size: elements of a query head.

    Raises:
        ModelError: a kind of scaling that is not known, or tensors that contradict it.
    """
    fields: dict[str, object] = {"rope_theta": metadata.number("rope.freq_base")}
    rotary_dim = metadata.integer("rope.dimension_count")
    if rotary_dim is not None and rotary_dim != head_size:
        # A bit more than the share, which is multiplied by the head size and rounded down.
        fields["partial_rotary_factor"] = (rotary_dim + 0.25) / head_size
    original = metadata.integer("rope.scaling.original_context_length")
    scaling = _scaling(metadata, original)
    if scaling is not None:
        fields["rope_scaling"] = scaling
        if scaling["rope_type"] == "longrope":
            fields["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return {name: value for name, value in fields.items() if value is not None}


def _scaling(metadata: Metadata, original: int | None) -> dict[str, object] | None:
    kind = metadata.text("rope.scaling.type")
    factor = metadata.number("rope.scaling.factor") or metadata.number("rope.scale_linear")
    if kind is not None and kind not in SCALING_TYPES:
        key = metadata.key("rope.scaling.type")
        raise metadata.error(key, f"is {kind[:40]!r}, which is not known", f"known: {', '.join(SCALING_TYPES)}")
    long, short = metadata.floats(LONG_FACTORS), metadata.floats(SHORT_FACTORS)
    if long is not None and short is not None:
        return _longrope(metadata, long, short, original)
    frequencies = metadata.floats(FREQUENCIES)
    if frequencies is not None:
        if kind in ("yarn", "longrope") or factor not in (None, 1.0):
            raise metadata.error(
                FREQUENCIES,
                f"is there in addition to rope.scaling.type {kind!r}",
                "only one kind of scaling is computed",
            )
        return _divided(metadata, frequencies)
    if kind == "longrope":
        raise metadata.error(
            LONG_FACTORS, "is missing, though rope.scaling.type is 'longrope'", "convert the model anew"
        )
    if kind == "none" or factor in (None, 0.0, 1.0):
        return None
    if kind == "yarn":
        return _yarn(metadata, factor, original)
    return {"rope_type": "linear", "factor": factor}


def _divided(metadata: Metadata, factors: list[float]) -> dict[str, object]:
    """Llama 3's scaling, which converters have computed: what each pair's frequency is divided by."""
    return {
        "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0,
        "attention_factor": 1.0, "original_max_position_embeddings": metadata.needed_integer("context_length"),
    }  # fmt: skip


def _longrope(metadata: Metadata, long: list[float], short: list[float], original: int | None) -> dict[str, object]:
    if original is None:
        raise metadata.missing("rope.scaling.original_context_length")
    scaling: dict[str, object] = {
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    attention_factor = metadata.number("rope.scaling.attn_factor")
    if attention_factor is not None:
        scaling["attention_factor"] = attention_factor
    return scaling


def _yarn(metadata: Metadata, factor: float | None, original: int | None) -> dict[str, object]:
    numbers = {
        "factor": factor,
        "beta_fast": metadata.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": metadata.number("rope.scaling.yarn_beta_slow"),
        "attention_factor": metadata.number("rope.scaling.yarn_attn_factor"),
    }
    scaling: dict[str, object] = {name: value for name, value in numbers.items() if value is not None}
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_type": "yarn", **scaling}
