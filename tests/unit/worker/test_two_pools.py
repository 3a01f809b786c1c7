"""Layers of attention whose blocks differ in bytes have pools of their own, and read their own blocks alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from quire.attention.context import ForwardContext
from quire.core.kv_spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from tests.unit.worker import toy_model
from tests.unit.worker.test_state_layers import BLOCK_SIZE, PROMPTS, StateModel, ToyEngine
from tests.unit.worker.toy_model import VOCAB_SIZE, ToyModel

WINDOW = 6


class TwoShapes(StateModel):
    """The toy of exact attention, beside a layer of two heads that sees a window: its sum shifts the logits.

    With `window=None` that layer sees all, so two groups keep whole sequences.
    """

    def __init__(self, window: int | None) -> None:
        self.window = window

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = ToyModel.forward(
            self, input_ids, positions, ForwardContext(context.metadata[:1], context.kv_caches[:1])
        )
        cache, metadata = context.attention(1)
        cache.view(-1)[metadata.slot_mapping] = input_ids.to(cache.dtype)
        for i in range(metadata.num_reqs):
            start, end = metadata.query_start_loc[i : i + 2].tolist()
            ids = cache[metadata.block_table[i].long()].view(-1)
            for token in range(start, end):
                last = int(positions[token]) + 1
                first = 0 if self.window is None else max(0, last - self.window)
                hidden[token] = hidden[token].roll(int(ids[first:last].sum()))
        return hidden

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        shape = {"block_size": block_size, "num_kv_heads": 2, "head_size": 1, "dtype_bytes": 4}
        other = FullAttentionSpec(**shape) if self.window is None else SlidingWindowSpec(**shape, sliding_window=WINDOW)
        return {**ToyModel.kv_cache_specs(self, block_size), "other": other}

    def next_token(self, context: Sequence[int]) -> int:  # type: ignore[override]
        seen = context if self.window is None else context[-self.window :]
        return (toy_model.next_token(list(context)) + sum(seen)) % VOCAB_SIZE


@pytest.mark.parametrize("window", [WINDOW, None], ids=["window", "two whole groups"])
def test_answers_follow_from_the_whole_context_whatever_is_found_in_the_cache(window: int | None) -> None:
    engine = ToyEngine(TwoShapes(window))
    assert [group.pool for group in engine.config.groups] == [0, 1]
    assert engine.run(PROMPTS) == engine.run(PROMPTS)
    engine.num_computed = 0
    engine.run([[*range(40)]], max_tokens=1)
    engine.run([[*range(39), 5]], max_tokens=1)
    assert engine.num_computed == 40 + 40 - 9 * BLOCK_SIZE


@pytest.mark.parametrize("window", [WINDOW, None], ids=["window", "two whole groups"])
@pytest.mark.parametrize(("mode", "swap_space"), [("recompute", 0.0), ("swap", 2.0**-16)])
def test_preempted_requests_go_on_with_their_own_blocks(window: int | None, mode: str, swap_space: float) -> None:
    engine = ToyEngine(TwoShapes(window), num_blocks=11, mode=mode, swap_space=swap_space, max_model_len=40)
    engine.run(PROMPTS)
    assert engine.num_preemptions > 0 and (engine.num_swaps > 0) == (mode == "swap")
