"""ModelArch: a decoder-only language model as data, layer by layer. Every family's `config.json` becomes one.

Made by the families (`config.families`), read by the generic decoder (`models.decoder`), the memory planner and the
simulator. Values only, no torch: it is made where commands start and crosses to the engine core's process.

A layer is a mixer and a feed-forward network, either of which may be missing:

    LayerArch(
        attention=AttentionArch(num_heads=32, num_kv_heads=8, head_size=128, scale=128**-0.5, rope=RopeConfig(...)),
        mlp=MLPArch(intermediate_size=14336),
        mixer_norm=NormArch(eps=1e-5),
        ffn_norm=NormArch(eps=1e-5),
    )
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from quire.config.hf_rope import RopeConfig
from quire.config.norm_arch import NormArch
from quire.config.quantized_checkpoint import CheckpointQuantization
from quire.config.recurrent_arch import GatedDeltaNetArch, MambaArch, ShortConvArch

__all__ = [
    "ACTIVATIONS",
    "AttentionArch",
    "AttentionTemperature",
    "EmbeddingArch",
    "FeedForward",
    "GatedDeltaNetArch",
    "HeadArch",
    "LatentAttentionArch",
    "LayerArch",
    "MLPArch",
    "MambaArch",
    "Mixer",
    "MoEArch",
    "ModelArch",
    "NormArch",
    "RouterArch",
    "ShortConvArch",
]  # fmt: skip

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""Of feed-forward networks. `relu2` is the square of a ReLU; `gelu` is the exact one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTemperature:
    """Queries at position p are multiplied by 1 + coefficient * log(1 + floor((p + offset) / period))."""

    coefficient: float
    period: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionArch:
    """Softmax attention over paged keys and values.

    Attributes:
        num_heads, num_kv_heads: over all ranks; the first is a multiple of the second.
        head_size: elements of a query and a key.
        scale: factor on the scores.
        rope: rotary embedding; None = positions enter elsewhere or not at all.
        window: tokens a query sees, itself included; None = all.
        chunk: a query sees only tokens of its own chunk of so many tokens (Llama 4); None = all.
        qkv_bias, output_bias: on the projections.
        head_norm: on every query and key head, before they are rotated. A centered one has gains of its own for each
            head (Command R+, StableLM 2 12B).
        norm_after_rope: `head_norm` comes after the rotation (Llama 4).
        has_row_norm: `head_norm` is on all query heads as one vector, and on all key heads as one (OLMo 2).
        has_value_norm: values have a norm without a gain, of the same eps (Gemma 4).
        soft_cap: scores become cap * tanh(score / cap); 0 = as they are.
        has_sinks: one learned logit for each head joins the softmax, without a value (gpt-oss).
        alibi_slopes: by head: slope * (key position - query position) is added to the scores (`config.alibi`).
        has_output_gate: heads' outputs are multiplied by the sigmoid of a second query projection (Qwen3.5).
        clip: queries, keys and values are limited to -clip .. clip, after `head_norm` and before they are rotated;
            0 = not (MPT, OLMoE).
        keys_are_values: one projection serves as keys and, before norm and rotation, as values (Gemma 4).
        shares_cache_of: number of the layer whose keys and values are read; None = the layer has its own (Gemma 4).
        temperature: scale of queries grows with the position (Llama 4, Ministral 3); None = it does not.
        output_scale: factor on the output (Falcon-H1).
        input_size: elements of the layer's input; 0 = the hidden size (EAGLE-3: twice that).
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: RopeConfig | None = None
    window: int | None = None
    chunk: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: NormArch | None = None
    norm_after_rope: bool = False
    has_row_norm: bool = False
    has_value_norm: bool = False
    soft_cap: float = 0.0
    has_sinks: bool = False
    alibi_slopes: tuple[float, ...] | None = None
    has_output_gate: bool = False
    clip: float = 0.0
    keys_are_values: bool = False
    shares_cache_of: int | None = None
    temperature: AttentionTemperature | None = None
    output_scale: float = 1.0
    input_size: int = 0

    def num_weights(self, hidden_size: int) -> int:
        """Of the projections."""
        query = self.num_heads * self.head_size
        key = self.num_kv_heads * self.head_size
        gate = query if self.has_output_gate else 0
        num_kv = 0 if self.shares_cache_of is not None else 1 if self.keys_are_values else 2
        return (self.input_size or hidden_size) * (query + gate + num_kv * key) + hidden_size * query

    @property
    def width(self) -> int:
        """Most elements of a token between the projections."""
        return (self.num_heads * (2 if self.has_output_gate else 1) + 2 * self.num_kv_heads) * self.head_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionArch:
    """Multi-head latent attention. Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.

    Attributes:
        query_rank: of the compressed queries; None = queries are projected at once.
        latent_size: elements of the compressed keys and values (kv_lora_rank).
        nope_size, rope_size: elements of a query and key head without and with rotation; the key's rotated part is
            shared by all heads.
        value_size: elements of a value head.
        scale: factor on the scores, with the rotary embedding's own.
        norm: on compressed queries and on the latent.
    """

    num_heads: int
    query_rank: int | None
    latent_size: int
    nope_size: int
    rope_size: int
    value_size: int
    scale: float
    rope: RopeConfig
    norm: NormArch = field(default_factory=NormArch)
    has_bias: bool = False

    def num_weights(self, hidden_size: int) -> int:
        """Of the projections."""
        head_size = self.nope_size + self.rope_size
        query_input = hidden_size if self.query_rank is None else self.query_rank
        queries = query_input * self.num_heads * head_size + hidden_size * (self.query_rank or 0)
        latent = hidden_size * (self.latent_size + self.rope_size)
        heads = self.latent_size * self.num_heads * (self.nope_size + self.value_size)
        return queries + latent + heads + self.num_heads * self.value_size * hidden_size

    @property
    def width(self) -> int:
        """Most elements of a token between the projections."""
        head = self.nope_size + 2 * self.rope_size + 2 * self.latent_size + self.value_size
        return self.num_heads * head + self.latent_size + self.rope_size + (self.query_rank or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPArch:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) where it is not gated.

    Attributes:
        gate_scale, output_scale: factors on gates, before their activation, and on the output (Falcon-H1).
        output_norm: on the output, before other networks' are added (Gemma 4).
    """

    intermediate_size: int
    activation: str = "silu"
    is_gated: bool = True
    has_bias: bool = False
    gate_scale: float = 1.0
    output_scale: float = 1.0
    output_norm: NormArch | None = None

    def num_weights(self, hidden_size: int) -> int:
        """Of the projections."""
        return (3 if self.is_gated else 2) * hidden_size * self.intermediate_size

    @property
    def width(self) -> int:
        """Most elements of a token between the projections, per matrix."""
        return self.intermediate_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterArch:
    """How a token's experts are chosen and weighed.

    Attributes:
        scoring: "softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen" (over the chosen ones' logits).
        is_normalized: the chosen scores are divided by their sum.
        scale: factor on the weights.
        num_groups, num_chosen_groups: experts outside the best groups are not chosen; 1 = no groups.
        group_score: how a group is scored: "max", or "top2" (the sum of its two best).
        has_correction: a learned vector is added to the scores for the choice alone (DeepSeek-V3).
        has_bias: a learned vector is added to the logits (gpt-oss).
        weighs_input: the weight multiplies the expert's input, not its output (Llama 4).
        jitter: of the sparse mixer, which chooses two experts one after the other (Phi-MoE); 0 = another router.
        norm: on the router's input (Gemma 4).
        logit_scale: factor on the logits.
        has_expert_scales: a learned factor of each expert is on its weights, at last (Gemma 4).
    """

    scoring: str = "softmax"
    is_normalized: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: str = "max"
    has_correction: bool = False
    has_bias: bool = False
    weighs_input: bool = False
    jitter: float = 0.0
    norm: NormArch | None = None
    logit_scale: float = 1.0
    has_expert_scales: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEArch:
    """A mixture of experts, each a gated MLP (or a plain one), and MLPs that every token passes through.

    Attributes:
        num_experts, num_chosen: of a layer, and of a token.
        intermediate_size: of one expert.
        shared_size: intermediate size of the shared expert; 0 = there is none.
        has_shared_gate: the shared expert's output is multiplied by the sigmoid of a projection (Qwen2-MoE).
        has_bias: on the experts' projections (gpt-oss).
        clamp: limit on gates and ups before they are combined, as gpt-oss does with `swiglu_alpha`; 0 = none.
        swiglu_alpha: gates become gate * sigmoid(alpha * gate), and ups have one added (gpt-oss); 0 = plain.
        latent_size: experts work on a projection of so many elements (Nemotron-H); 0 = on the hidden size.
        is_mxfp4: checkpoints have the experts' weights in MXFP4 (gpt-oss).
        input_norm, output_norm: around the experts, which then take the residual stream in place of what the layer's
            `ffn_norm` made of it; so does the router, without `input_norm` (Gemma 4).
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    router: RouterArch = RouterArch()
    activation: str = "silu"
    is_gated: bool = True
    shared_size: int = 0
    has_shared_gate: bool = False
    has_bias: bool = False
    clamp: float = 0.0
    swiglu_alpha: float = 0.0
    latent_size: int = 0
    is_mxfp4: bool = False
    input_norm: NormArch | None = None
    output_norm: NormArch | None = None

    def num_weights(self, hidden_size: int) -> int:
        """Of all experts, the shared one and the router."""
        shared = (3 if self.is_gated else 2) * hidden_size * self.shared_size
        others = shared + hidden_size * self.num_experts + 2 * hidden_size * self.latent_size
        return self.num_expert_weights(hidden_size) + others

    def num_expert_weights(self, hidden_size: int) -> int:
        """Of all experts but the shared one."""
        size = self.latent_size or hidden_size
        return self.num_experts * (3 if self.is_gated else 2) * size * self.intermediate_size

    @property
    def width(self) -> int:
        """Most elements of a token between the projections, per matrix."""
        return self.num_chosen * self.intermediate_size + self.shared_size

    def num_active_weights(self, hidden_size: int) -> int:
        """Of what one token passes through."""
        return replace(self, num_experts=self.num_chosen).num_weights(hidden_size) + hidden_size * (
            self.num_experts - self.num_chosen
        )


Mixer = AttentionArch | LatentAttentionArch | GatedDeltaNetArch | ShortConvArch | MambaArch
FeedForward = MLPArch | MoEArch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerArch:
    """One layer: mixers whose outputs are added up, then feed-forward networks likewise.

    Where `is_parallel`, all of them take the layer's input and their outputs are added to it at once; `ffn_norm` is
    then None if the feed-forward network shares the mixer's norm. Where `is_post_norm`, `mixer_norm` and `ffn_norm` are
    on the residual stream, each after an output was added to it.

    Attributes:
        mixer_norm, ffn_norm: on the inputs.
        mixer_post_norm, ffn_post_norm: on the outputs, before they are added to the residual stream.
        residual_scale: factor on outputs before they are added.
        output_scale: the layer's result is multiplied by a learned number (Gemma 4).
        per_layer_input: elements of the second embedding that is added at the layer's end (Gemma 4 E); 0 = none. All
            layers have the same number.
    """

    attention: AttentionArch | None = None
    latent_attention: LatentAttentionArch | None = None
    delta_net: GatedDeltaNetArch | None = None
    short_conv: ShortConvArch | None = None
    mamba: MambaArch | None = None
    mlp: MLPArch | None = None
    moe: MoEArch | None = None
    mixer_norm: NormArch | None = None
    mixer_post_norm: NormArch | None = None
    ffn_norm: NormArch | None = None
    ffn_post_norm: NormArch | None = None
    is_parallel: bool = False
    is_post_norm: bool = False
    residual_scale: float = 1.0
    output_scale: bool = False
    per_layer_input: int = 0

    @property
    def leaves_stream(self) -> bool:
        """Its output is to be added to the residual stream by the next layer; else it gives their sum."""
        return not (self.is_post_norm or self.output_scale or self.per_layer_input)

    def mixers(self) -> Iterator[tuple[str, Mixer]]:
        """Field name and value of those that the layer has."""
        for name in ("attention", "latent_attention", "delta_net", "short_conv", "mamba"):
            part = getattr(self, name)
            if part is not None:
                yield name, part

    def feed_forwards(self) -> Iterator[tuple[str, FeedForward]]:
        """Field name and value of those that the layer has."""
        for name in ("mlp", "moe"):
            part = getattr(self, name)
            if part is not None:
                yield name, part

    def num_weights(self, hidden_size: int) -> int:
        """Of all projections."""
        parts = [part for _, part in (*self.mixers(), *self.feed_forwards())]
        return sum(part.num_weights(hidden_size) for part in parts) + 3 * hidden_size * self.per_layer_input

    def num_active_weights(self, hidden_size: int) -> int:
        """Of the projections that one token passes through."""
        idle = 0 if self.moe is None else self.moe.num_weights(hidden_size) - self.moe.num_active_weights(hidden_size)
        return self.num_weights(hidden_size) - idle


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingArch:
    """From token ids to the first layer's input.

    Attributes:
        scale: factor on the vectors.
        num_positions: of a learned table of positions; 0 = there is none.
        position_offset: row of position 0 in that table (OPT: 2).
        norm: on the sum.
        table_size: elements of a vector in the table, which are projected to the hidden size, and back before the
            output projection (OPT 350M); 0 = the hidden size.
        per_layer_vocab_size: of the second embedding, where layers have an input of their own.
    """

    scale: float = 1.0
    num_positions: int = 0
    position_offset: int = 0
    norm: NormArch | None = None
    table_size: int = 0
    per_layer_vocab_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadArch:
    """From the last layer's output to logits.

    Attributes:
        norm: before the projection; None = there is none.
        has_bias: on the projection.
        scale: factor on the logits.
        soft_cap: logits become cap * tanh(logit / cap); 0 = as they are.
    """

    norm: NormArch | None = None
    has_bias: bool = False
    scale: float = 1.0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArch:
    """A decoder-only language model's shape, whatever its family calls the fields.

    Attributes:
        architecture: as in config.json, e.g. "LlamaForCausalLM".
        max_position_embeddings: longest sequence the model was made for, rope scaling included.
        tie_word_embeddings: the output projection is the embedding table.
        eos_token_ids: ends of a turn; the first is the primary.
        torch_dtype: dtype named by the checkpoint, "" when it names none.
        gguf_architecture: `general.architecture` of the GGUF file that the model is read from, by which its tensors are
            named and stored; "" = as the architecture's own checkpoints.
        config_json: of a model that a class of transformers computes: its config.json; the layers are then a guess.
        quantization: how the checkpoint stores its weights; None = as plain numbers.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerArch, ...]
    embedding: EmbeddingArch = EmbeddingArch()
    head: HeadArch = HeadArch()
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    torch_dtype: str = ""
    initializer_range: float = 0.02
    gguf_architecture: str = ""
    config_json: str = ""
    quantization: CheckpointQuantization | None = None

    @property
    def num_layers(self) -> int:
        """Of the decoder."""
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[AttentionArch, ...]:
        """The softmax attention of every layer that has it."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def has_states(self) -> bool:
        """Whether there are recurrent layers."""
        return any(layer.delta_net or layer.short_conv or layer.mamba for layer in self.layers)

    @property
    def max_head_size(self) -> int:
        """Elements of the largest head of softmax attention; 0 without such layers."""
        return max((attention.head_size for attention in self.attention_layers), default=0)

    @property
    def num_layer_weights(self) -> int:
        """Of the projections of all layers."""
        return sum(layer.num_weights(self.hidden_size) for layer in self.layers)

    @property
    def num_active_layer_weights(self) -> int:
        """Of the projections that one token passes through."""
        return sum(layer.num_active_weights(self.hidden_size) for layer in self.layers)

    @property
    def table_size(self) -> int:
        """Elements of a token's vector in the embedding, and of a row of the output projection."""
        return self.embedding.table_size or self.hidden_size

    @property
    def num_table_weights(self) -> int:
        """Of the embeddings, and of the output projection where that is a matrix of its own."""
        per_layer = self.embedding.per_layer_vocab_size * sum(layer.per_layer_input for layer in self.layers)
        projections = 2 * self.hidden_size * self.embedding.table_size
        return self.vocab_size * self.table_size * (1 if self.tie_word_embeddings else 2) + projections + per_layer
