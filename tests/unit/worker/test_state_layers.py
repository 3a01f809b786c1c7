"""A model of full attention and a recurrent layer runs on blocks of the scheduler: one holds a request's state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.attention.context import ForwardContext
from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, MambaSpec
from quire.errors import UnsupportedError
from quire.layers.recurrent_state import state_tensors
from quire.scheduler.scheduler import Scheduler
from quire.utils.memory import GIB
from quire.worker.device.memory import HostMemory
from tests.unit.scheduler.harness import make_request
from tests.unit.worker import toy_model
from tests.unit.worker.driver import make_runner
from tests.unit.worker.toy_model import VOCAB_SIZE, ToyBackend, ToyModel

BLOCK_SIZE = 4
STATE = MambaSpec(block_size=BLOCK_SIZE, shapes=((2,), (1,)), dtype_bytes=(4, 4), page_size_padded=4 * BLOCK_SIZE)


def next_state(state: list[int], token_id: int) -> list[int]:
    return [(3 * state[0] + token_id + 1) % VOCAB_SIZE, state[0]]


def next_token(context: list[int]) -> int:
    """What the hybrid says after `context`: attention over all of it, and a state of all of it."""
    state = [0, 0]
    for token_id in context:
        state = next_state(state, token_id)
    return (toy_model.next_token(context) + state[0] + state[1]) % VOCAB_SIZE


class HybridModel(ToyModel):
    """The toy of exact attention, whose logits are shifted by a recurrent layer's state."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        attention = ForwardContext(context.metadata[:1], context.kv_caches[:1])
        hidden = super().forward(input_ids, positions, attention)
        kv_cache, metadata = context.state(1)
        states, counts = state_tensors(kv_cache, STATE.shapes, (torch.float32, torch.int32))
        for i, (read, write) in enumerate(
            zip(metadata.read_block.tolist(), metadata.write_block.tolist(), strict=True)
        ):
            start, end = metadata.query_start_loc[i : i + 2].tolist()
            state = [0, 0] if read < 0 else states[read].long().tolist()
            num_read = 0 if read < 0 else int(counts[read])
            assert int(positions[start]) == num_read == int(metadata.num_computed_tokens[i]), "a state of other tokens"
            for token in range(start, end):
                state = next_state(state, int(input_ids[token]))
                hidden[token] = hidden[token].roll(sum(state))
            states[write], counts[write] = torch.tensor(state), int(positions[end - 1]) + 1
        return hidden

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        return {**super().kv_cache_specs(block_size), "mixer": STATE}


@pytest.mark.parametrize("num_blocks", [60, 16])
def test_a_hybrid_model_answers_by_its_whole_context_also_when_requests_are_preempted(num_blocks):
    model = HybridModel()
    runner = make_runner(
        model, ToyBackend(), vocab_size=VOCAB_SIZE, max_num_seqs=4, max_model_len=40, num_blocks=num_blocks
    )
    groups = [KVCacheGroupSpec(layer_names=(name,), spec=spec) for name, spec in model.kv_cache_specs(4).items()]
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=10, max_num_seqs=4),
        CacheConfig(block_size=BLOCK_SIZE),
        KVCacheConfig(num_blocks=num_blocks, groups=tuple(groups)),
        max_model_len=40,
    )
    prompts = {handle: [5, 8, 13, handle] * (1 + handle % 3) for handle in range(7)}
    tokens: dict[int, list[int]] = {handle: [] for handle in prompts}
    num_preemptions = 0
    for handle, prompt in prompts.items():
        scheduler.add_request(make_request(handle, prompt, max_tokens=9, ignore_eos=True, temperature=0.0))
    while (step := scheduler.schedule()) is not None:
        outputs = scheduler.update_from_output(step, runner.sample_tokens(runner.execute_model(step.output)))
        num_preemptions += outputs.stats.num_preemptions
        for handle, token in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
            assert token == next_token([*prompts[handle], *tokens[handle]])
            tokens[handle].append(token)
    assert [len(answer) for answer in tokens.values()] == [9] * 7
    assert (num_preemptions > 0) == (num_blocks == 16)


def test_states_are_views_of_their_pages_bytes():
    cache = torch.zeros(3, 2, 8)
    first, second = state_tensors(cache, ((2, 3), (4,)), (torch.float32, torch.bfloat16))
    assert first.shape == (3, 2, 3) and second.shape == (3, 4)
    first[1], second[2] = 1.0, 2.0
    assert np.flatnonzero(cache.view(3, -1).abs().sum(dim=1).numpy()).tolist() == [1, 2]
    assert cache.view(3, -1)[1].tolist() == [1.0] * 6 + [0.0] * 10


def test_a_backend_whose_pages_are_scattered_is_refused_for_a_model_with_states():
    full = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype_bytes=4)
    groups = tuple(KVCacheGroupSpec(layer_names=(name,), spec=spec) for name, spec in (("a", full), ("m", STATE)))
    config = KVCacheConfig(num_blocks=8, groups=groups)
    with pytest.raises(UnsupportedError, match="scatters the bytes of a page"):
        HostMemory(GIB).allocate_kv_caches(config, ["a", "m"], TorchReferenceBackend(), torch.float32)
