"""What the `config.json` files of all families have in common, read into the parts of a `ModelArch`.

Called by the families (`config.families`), which know what differs. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS
from quire.config.model_arch import EmbeddingArch, HeadArch, LayerArch, ModelArch

DTYPE_NAMES = ("float16", "bfloat16", "float32")
MAX_VOCAB_SIZE = 1 << 20
MAX_LAYERS = 1000
MAX_HEADS = 1024
MAX_HEAD_SIZE = 512
MAX_HIDDEN_SIZE = 1 << 16
MAX_INTERMEDIATE_SIZE = 1 << 20
# Names that config.json files use for an activation -> the one of `model_arch.ACTIVATIONS`.
ACTIVATION_NAMES: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Query heads, key/value heads and elements per head."""

    num_heads: int
    num_kv_heads: int
    head_size: int


def make_arch(
    config: FieldReader,
    layers: Sequence[LayerArch],
    longest_sequence: int,
    *,
    head: HeadArch,
    embedding: EmbeddingArch | None = None,
    is_tied: bool = False,
    hidden_name: str = "hidden_size",
) -> ModelArch:
    """The model of these layers; sizes and special tokens come from the fields that all families have.

    The registry names its architecture and type.

    Args:
        longest_sequence: in tokens, rope scaling included.
        is_tied: what an absent `tie_word_embeddings` means to the family.
        hidden_name: the family's field for the hidden size.

    Raises:
        ModelError: as `FieldReader`.
    """
    vocab_size = config.integer("vocab_size", 1, MAX_VOCAB_SIZE)
    bos_token_ids = config.integers("bos_token_id", 0, vocab_size - 1)
    return ModelArch(
        architecture="",
        model_type="",
        vocab_size=vocab_size,
        hidden_size=read_hidden_size(config, hidden_name),
        max_position_embeddings=longest_sequence,
        layers=tuple(layers),
        embedding=embedding or EmbeddingArch(),
        head=head,
        tie_word_embeddings=config.flag("tie_word_embeddings", is_tied),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=config.integers("eos_token_id", 0, vocab_size - 1),
        torch_dtype=_dtype(config),
        initializer_range=config.number("initializer_range", 0.0, 10.0, 0.02),
    )


def read_hidden_size(config: FieldReader, name: str = "hidden_size") -> int:
    """Elements of the residual stream."""
    return config.integer(name, 1, MAX_HIDDEN_SIZE)


def read_intermediate_size(config: FieldReader, name: str = "intermediate_size") -> int:
    """Elements within a feed-forward network."""
    return config.integer(name, 1, MAX_INTERMEDIATE_SIZE)


def read_num_layers(config: FieldReader, name: str = "num_hidden_layers") -> int:
    """Layers of the decoder."""
    return config.integer(name, 1, MAX_LAYERS)


def read_max_positions(config: FieldReader, name: str = "max_position_embeddings") -> int:
    """Longest sequence, before rope scaling."""
    return config.integer(name, 1, MAX_POSITIONS)


def read_norm_eps(config: FieldReader, name: str = "rms_norm_eps", default: float = 1e-6) -> float:
    """What a norm adds to the mean square."""
    return config.number(name, 1e-12, 0.1, default)


def read_activation(
    config: FieldReader, name: str = "hidden_act", default: str = "silu", known: Sequence[str] = ("silu", "swish")
) -> str:
    """The activation of the feed-forward networks, one of `model_arch.ACTIVATIONS`.

    Args:
        known: names of config.json, keys of `ACTIVATION_NAMES`, that the family is computed with.
    """
    return ACTIVATION_NAMES[config.text(name, known, default)]


def read_heads(config: FieldReader, default_head_size: int | None = None) -> Heads:
    """Heads of the usual fields.

    Args:
        default_head_size: without `head_dim`; None = hidden_size / num_attention_heads.

    Raises:
        ModelError: heads that do not divide, or as `FieldReader`.
    """
    hidden_size = read_hidden_size(config)
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    check_divides(config, "num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    head_size = config.optional_integer("head_dim", 1, MAX_HEAD_SIZE)
    if head_size is None:
        head_size = default_head_size
    if head_size is None:
        head_size = divided_head_size(config, hidden_size, num_heads)
    return Heads(num_heads=num_heads, num_kv_heads=num_kv_heads, head_size=head_size)


def check_divides(config: FieldReader, name: str, value: int, of_name: str, of_value: int) -> None:
    """Raises ModelError unless `value` divides `of_value`."""
    if of_value % value:
        raise config.error(
            name,
            f"is {value}, which does not divide {of_name} ({of_value})",
            "each key/value head serves the same number of query heads"
            if name == "num_key_value_heads"
            else "correct one of the two",
        )


def divided_head_size(
    config: FieldReader,
    hidden_size: int,
    num_heads: int,
    hidden_name: str = "hidden_size",
    heads_name: str = "num_attention_heads",
) -> int:
    """Elements per head where heads divide the hidden size; the names are the family's."""
    if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_SIZE:
        raise config.error(
            hidden_name,
            f"is {hidden_size}, which {heads_name} ({num_heads}) does not divide into heads of at most "
            f"{MAX_HEAD_SIZE} elements",
            "correct one of the two, or add head_dim",
        )
    return hidden_size // num_heads


def read_layer_types(config: FieldReader, num_layers: int, known: Sequence[str]) -> tuple[str, ...]:
    """`layer_types`, each one of `known`; empty when absent.

    Raises:
        ModelError: another number of layers, or an unknown type.
    """
    layer_types = config.texts("layer_types")
    if layer_types and len(layer_types) != num_layers:
        raise config.error("layer_types", f"names {len(layer_types)} layers", f"num_hidden_layers is {num_layers}")
    for kind in layer_types:
        if kind not in known:
            raise config.error("layer_types", f"has {kind[:40]!r}", f"known: {', '.join(known)}")
    return layer_types


def read_windows(
    config: FieldReader, num_layers: int, period: int, default: int | None = 4096
) -> tuple[int | None, ...]:
    """`sliding_window` for the layers that `layer_types` names, or else for all but the last of every `period`.

    Args:
        default: the window where the field is absent; an explicit null means none.
    """
    window = config.optional_integer("sliding_window", 1, MAX_POSITIONS)
    if window is None and "sliding_window" not in config.raw:
        window = default
    kinds = read_layer_types(config, num_layers, ("full_attention", "sliding_attention"))
    if window is None:
        return (None,) * num_layers
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return tuple(window if (layer + 1) % period else None for layer in range(num_layers))


def check_windows(config: FieldReader, windows: Sequence[int | None]) -> None:
    """Raises ModelError unless `layer_types`, when given, says what `windows` say."""
    layer_types = read_layer_types(config, len(windows), ("full_attention", "sliding_attention"))
    for layer, (kind, window) in enumerate(zip(layer_types, windows, strict=bool(layer_types))):
        if (kind == "sliding_attention") != (window is not None):
            raise config.error(
                "layer_types",
                f"says layer {layer} is {kind}, but sliding_window and use_sliding_window give it "
                f"{'no window' if window is None else f'a window of {window}'}",
                "correct layer_types or the window fields",
            )


def _dtype(config: FieldReader) -> str:
    name = "dtype" if config.has("dtype") else "torch_dtype"
    value = config.raw.get(name)
    if isinstance(value, str):
        config = FieldReader({name: value.removeprefix("torch.")}, config.source)
    return config.text(name, DTYPE_NAMES, "")
