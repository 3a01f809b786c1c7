"""What is in transformers' attention registry for Quire: `attend` computes, `note` writes down what a class asks for.

Called by the classes' own attention modules, which look them up by the names below. What `attend` needs is held by the
module it is called with: nothing here has state but the registry's entries.

Source: the `AttentionInterface` and `AttentionMaskInterface` of transformers' documentation ("Attention backends").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.context import ForwardContext
from quire.attention.metadata import AttentionMetadata

ATTEND, NOTE = "quire", "quire_note"
LAYER, NOTES = "_quire_layer", "_quire_notes"
"""Attributes of attention modules: the layer that computes, the list that calls are noted in."""
WITHOUT_EFFECT = frozenset({
    "attention_mask", "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "s_aux", "scaling", "sliding_window", "softcap",
    "use_cache",
})  # fmt: skip
"""Arguments of attention functions that are honoured, or that change nothing where there is a paged cache."""


@dataclass(slots=True)
class StepInput:
    """What a model's attention layers share: the context of the step that is running."""

    context: ForwardContext | None = None


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One attention layer of a model.

    Attributes:
        index, name: its place in the step's context, and its name in the KV cache specs.
    """

    params: AttentionParams
    backend: AttentionBackend
    index: int
    name: str
    step: StepInput

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """[1, heads, num_tokens, size] each -> [1, num_tokens, num_heads, size of values]; sinks are [num_heads].

        Shorter values than keys are padded: the cache holds as much of both.
        """
        context = self.step.context
        assert context is not None, "attention runs within a step"
        value_size, head_size = value.shape[-1], self.params.head_size
        if value_size < head_size:
            value = torch.nn.functional.pad(value, (0, head_size - value_size))
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        cache, metadata = context.kv_caches[self.index], context.metadata[self.index]
        assert isinstance(metadata, AttentionMetadata)
        return self.backend.forward(self.params, q, k, v, cache, metadata, sinks)[None, :, :, :value_size]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """What one call of the attention function asked for.

    Attributes:
        num_heads, num_kv_heads, head_size, value_size: of queries, keys and values.
        scale: factor on the scores.
        window: tokens a query sees, itself included; None = all.
        soft_cap: of the scores; 0 = none.
        problems: what Quire does not compute.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scale: float
    window: int | None
    soft_cap: float
    problems: tuple[str, ...]


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    s_aux: torch.Tensor | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over the paged cache, with sinks `s_aux`. All else was noted before weights were read."""
    layer: PagedLayer = module.__dict__[LAYER]
    return layer.forward(query, key, value, None if s_aux is None else s_aux.float()), None


def note(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **given: Any
) -> tuple[torch.Tensor, None]:
    """Write down what is asked, on tensors without values."""
    mask = getattr(attention_mask, "quire_mask", None)
    scale = given.get("scaling")
    module.__dict__.setdefault(NOTES, []).append(
        AttentionCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            value_size=value.shape[3],
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            window=mask.window if isinstance(mask, CausalMask) else None,
            soft_cap=float(given.get("softcap") or 0.0),
            problems=tuple(_problems(module, query.shape[1], mask, given)),
        )
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return torch.empty(shape, dtype=query.dtype, device=query.device), None


def _problems(module: nn.Module, num_heads: int, mask: Any, given: dict[str, Any]) -> list[str]:
    problems = []
    if not isinstance(mask, CausalMask):
        problems.append(mask if isinstance(mask, str) else "it makes attention masks of its own")
    if given.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        problems.append("its attention is not causal")
    sinks = given.get("s_aux")
    if sinks is not None and tuple(sinks.shape) != (num_heads,):
        problems.append(f"its attention has sinks of shape {list(sinks.shape)}")
    asked = [name for name, value in given.items() if name not in WITHOUT_EFFECT and value is not None]
    return [*problems, *(f"its attention is called with {name}" for name in sorted(asked))]


@dataclass(frozen=True, slots=True)
class CausalMask:
    """A query sees what is before it: `window` tokens, itself included; None = all."""

    window: int | None


def note_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], config: Any, **_: Any
) -> torch.Tensor:
    """A mask without values that says what it is (`quire_mask`): a `CausalMask`, or why it is none of those."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    longest = int(getattr(config, "max_position_embeddings", None) or 1 << 17)
    mask.quire_mask = _kind_of(mask_function, min(longest, 1 << 20))  # type: ignore[attr-defined]
    return mask


def _kind_of(mask_function: Callable[..., torch.Tensor], longest: int) -> CausalMask | str:
    """What a mask shows to the queries of a sequence of `longest` tokens."""
    zero, keys = torch.zeros((), dtype=torch.long, device="cpu"), torch.arange(longest, device="cpu")

    def seen(query: int) -> torch.Tensor:
        return mask_function(zero, zero, torch.tensor(query, device="cpu"), keys).expand(longest)

    try:
        window = int(seen(longest - 1).sum())
        for query in {0, 1, longest // 3, longest // 2, window - 1, window, longest - 1} & set(range(longest)):
            if not torch.equal(seen(query), (keys <= query) & (keys > query - window)):
                return "its attention masks are neither causal nor sliding windows"
    except (RuntimeError, NotImplementedError):
        return "its attention masks depend on values"
    return CausalMask(None if window >= longest else window)


def register() -> None:
    """Put the functions into transformers' registries; harmless when repeated."""
    AttentionInterface.register(ATTEND, attend)
    AttentionInterface.register(NOTE, note)
    AttentionMaskInterface.register(NOTE, note_mask)
