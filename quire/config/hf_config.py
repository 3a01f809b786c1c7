"""One normal form for every `config.json`: `ModelArch`. Models and the KV planning read only this.

`parse_hf_config` turns the JSON object of a known architecture into it; `models.model_dir` reads the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.config.hf_fields import FieldReader
from quire.config.hf_rope import MAX_POSITIONS, RopeConfig, parse_rope
from quire.errors import ModelError
from quire.plugins import MODEL, plugin_names

__all__ = ["ARCHITECTURES", "ModelArch", "RopeConfig", "parse_hf_config"]

# Architecture -> the `model_type` that transformers writes beside it. Their classes: `models.registry`.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
DTYPE_NAMES = ("float16", "bfloat16", "float32")
MAX_VOCAB_SIZE = 1 << 20
MAX_LAYERS = 1000
MAX_HEADS = 1024
MAX_HEAD_SIZE = 512
MAX_HIDDEN_SIZE = 1 << 16
MAX_INTERMEDIATE_SIZE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArch:
    """A decoder-only transformer's shape, whatever its family calls the fields.

    Attributes:
        architecture: as in config.json, e.g. "LlamaForCausalLM".
        total_num_heads, total_num_kv_heads: over all ranks.
        sliding_window: per layer: tokens a query sees, itself included; None = all.
        qk_norm: RMSNorm on each query and key head (Qwen3).
        attention_bias: bias on q, k, v projections; output_bias: on o_proj; mlp_bias: on the MLP.
        max_position_embeddings: longest sequence the model was made for, rope scaling included.
        eos_token_ids: ends of a turn; the first is the primary.
        torch_dtype: dtype named by the checkpoint, "" when it names none.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    total_num_heads: int
    total_num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    rope: RopeConfig
    sliding_window: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = ""
    initializer_range: float = 0.02


def parse_hf_config(raw: Mapping[str, object]) -> ModelArch:
    """The shape that a `config.json` object describes.

    Fields that transformers fills with a default when they are absent get the same default here, except the sizes,
    which are required. Fields of no known meaning are ignored, as transformers does.

    Raises:
        ModelError: an unknown architecture, a quantized checkpoint, or a field that is missing, of the wrong type,
            out of range, or at odds with another; names the field and the fix.
    """
    config = FieldReader(raw)
    architecture = _architecture(config)
    _refuse_quantized(config)
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    vocab_size = config.integer("vocab_size", 1, MAX_VOCAB_SIZE)
    num_heads, num_kv_heads, head_size = _heads(config, architecture)
    max_positions = config.integer("max_position_embeddings", 1, MAX_POSITIONS)
    rope, longest_sequence = parse_rope(config, head_size, max_positions)
    attention_bias, output_bias = _attention_biases(config, architecture)
    bos_token_ids = config.integers("bos_token_id", 0, vocab_size - 1)
    return ModelArch(
        architecture=architecture,
        model_type=ARCHITECTURES[architecture],
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size", 1, MAX_HIDDEN_SIZE),
        intermediate_size=config.integer("intermediate_size", 1, MAX_INTERMEDIATE_SIZE),
        num_layers=num_layers,
        total_num_heads=num_heads,
        total_num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=longest_sequence,
        rms_norm_eps=config.number("rms_norm_eps", 1e-12, 0.1, 1e-6),
        hidden_act=config.text("hidden_act", ("silu", "swish"), "silu").replace("swish", "silu"),
        rope=rope,
        sliding_window=_sliding_windows(config, architecture, num_layers),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.flag("mlp_bias", False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=config.integers("eos_token_id", 0, vocab_size - 1),
        torch_dtype=_dtype(config),
        initializer_range=config.number("initializer_range", 0.0, 10.0, 0.02),
    )


def _architecture(config: FieldReader) -> str:
    named = config.texts("architectures")
    for name in named:
        if name in ARCHITECTURES:
            return name
    if named:
        known = ", ".join([*ARCHITECTURES, *plugin_names(MODEL)])
        raise ModelError(
            f"architecture {named[0][:80]!r} is not implemented", hint=f"Quire has {known}", field="architectures"
        )
    model_type = config.text("model_type", tuple(ARCHITECTURES.values()), "")
    for name, candidate in ARCHITECTURES.items():
        if candidate == model_type:
            return name
    raise config.error("architectures", "is missing", f"add a list with one of: {', '.join(ARCHITECTURES)}")


def _refuse_quantized(config: FieldReader) -> None:
    for name in ("quantization_config", "compression_config"):
        quantization = config.raw.get(name)
        if quantization is None:
            continue
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise config.error(
            name,
            f"says the weights are quantized ({str(method)[:40]}), which Quire does not support",
            "use the model's unquantized checkpoint (float16, bfloat16 or float32)",
        )


def _heads(config: FieldReader, architecture: str) -> tuple[int, int, int]:
    """Query heads, key/value heads, elements per head."""
    hidden_size = config.integer("hidden_size", 1, MAX_HIDDEN_SIZE)
    num_heads = config.integer("num_attention_heads", 1, MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", 1, MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads",
            f"is {num_kv_heads}, which does not divide num_attention_heads ({num_heads})",
            "each key/value head serves the same number of query heads",
        )
    head_size = config.optional_integer("head_dim", 1, MAX_HEAD_SIZE)
    if head_size is None and architecture == "Qwen3ForCausalLM":
        head_size = 128  # what transformers takes for this family
    if head_size is None:
        head_size = _divided(config, hidden_size, num_heads)
    return num_heads, num_kv_heads, head_size


def _divided(config: FieldReader, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads or hidden_size // num_heads > MAX_HEAD_SIZE:
        raise config.error(
            "hidden_size",
            f"is {hidden_size}, which num_attention_heads ({num_heads}) does not divide into heads of at most "
            f"{MAX_HEAD_SIZE} elements",
            "correct one of the two, or add head_dim",
        )
    return hidden_size // num_heads


def _attention_biases(config: FieldReader, architecture: str) -> tuple[bool, bool]:
    """Bias on the q, k, v projections, and on the output projection."""
    if architecture == "MistralForCausalLM":
        return False, False
    if architecture == "Qwen2ForCausalLM":
        return True, False
    has_bias = config.flag("attention_bias", False)
    return has_bias, has_bias


def _sliding_windows(config: FieldReader, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "LlamaForCausalLM":
        windows: tuple[int | None, ...] = (None,) * num_layers
    elif architecture == "MistralForCausalLM":
        # An absent field means 4096 to transformers; an explicit null means no window.
        default = None if "sliding_window" in config.raw else 4096
        window = config.optional_integer("sliding_window", 1, MAX_POSITIONS)
        windows = (window if window is not None else default,) * num_layers
    else:
        windows = _qwen_windows(config, num_layers)
    _check_layer_types(config, windows)
    return windows


def _qwen_windows(config: FieldReader, num_layers: int) -> tuple[int | None, ...]:
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    default = None if "sliding_window" in config.raw else 4096
    window = config.optional_integer("sliding_window", 1, MAX_POSITIONS) or default
    layer_types = config.texts("layer_types")
    if layer_types:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    first = config.integer("max_window_layers", 0, 1 << 16, 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _check_layer_types(config: FieldReader, windows: tuple[int | None, ...]) -> None:
    """`layer_types`, when given, must say what `windows` say."""
    layer_types = config.texts("layer_types")
    if not layer_types:
        return
    num_layers = config.integer("num_hidden_layers", 1, MAX_LAYERS)
    if len(layer_types) != num_layers:
        raise config.error("layer_types", f"names {len(layer_types)} layers", f"num_hidden_layers is {num_layers}")
    for layer, (kind, window) in enumerate(zip(layer_types, windows, strict=True)):
        if kind not in ("full_attention", "sliding_attention"):
            raise config.error("layer_types", f"has {kind[:40]!r}", "known: full_attention, sliding_attention")
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
