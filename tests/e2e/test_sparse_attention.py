"""Block-level top-k attention: bounds hold, the same bits in every batch and chunking, whole where all fits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.attention.sparse import BlockTopK, _bounds
from quire.errors import ConfigError, UnsupportedError
from tests.e2e.test_connector import BLOCK_SIZE, Core
from tests.unit.scheduler.harness import make_request

NUM_BLOCKS = 4
PROMPT = [(i * 53) % 900 + 5 for i in range(150)]
OTHERS = [[(i * k) % 900 + 5 for i in range(90 + k)] for k in (7, 11, 13)]


def test_no_key_has_a_score_above_its_blocks_bound():
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(5, 6, 24, generator=generator)
    keys = torch.randn(9, 2, 16, 24, generator=generator)
    bounds = _bounds(query, keys.amin(2), keys.amax(2))
    for head in range(6):
        scores = torch.einsum("td,bsd->tbs", query[:, head], keys[:, head // 3])
        assert (scores.amax(2) <= bounds + 1e-4).all()
    assert torch.equal(bounds[2:3], _bounds(query[2:3], keys.amin(2), keys.amax(2)))
    assert torch.equal(bounds[:, 4:6], _bounds(query, keys[4:6].amin(2), keys[4:6].amax(2)))


def answers(core: Core, prompts: list[list[int]]) -> list[tuple[list[int], bytes]]:
    """Tokens and log-probabilities of prompts that are asked at once."""
    for handle, prompt in enumerate(prompts):
        request = make_request(handle, prompt, max_tokens=12, temperature=0.0, logprobs=3)
        core.core.add_request(request)
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs = [b"" for _ in prompts]
    while core.core.has_work():
        outputs = core.core.step()
        if outputs is None:
            continue
        for handle, token in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
            tokens[handle].append(token)
        lines = outputs.logprobs
        for place, values in () if lines is None else zip(lines.index.tolist(), lines.logprobs, strict=True):
            logprobs[int(outputs.handles[place])] += values.tobytes()
    return list(zip(tokens, logprobs, strict=True))


@pytest.fixture(scope="module")
def sparse() -> list[tuple[list[int], bytes]]:
    core = Core(sparse_attention_blocks=NUM_BLOCKS)
    found = answers(core, [PROMPT])
    assert answers(core, [PROMPT]) == found, "blocks of the prefix cache are summed up as they were"
    core.core.shutdown()
    return found


def test_a_token_has_the_same_bits_in_every_batch_and_chunking(sparse):
    core = Core(sparse_attention_blocks=NUM_BLOCKS, max_num_batched_tokens=37, max_num_seqs=4)
    assert answers(core, [PROMPT]) == sparse
    core.core.reset_prefix_cache()
    together = answers(core, [PROMPT, *OTHERS])
    assert together[:1] == sparse
    core.core.reset_prefix_cache()
    tokens, logprobs = sparse[0]
    ((continued, their_logprobs),) = answers(core, [[*PROMPT, *tokens[:8]]])  # decoded before, part of a prompt now
    num_bytes = len(logprobs) // 12
    assert continued[:4] == tokens[8:] and their_logprobs[: 4 * num_bytes] == logprobs[8 * num_bytes :]
    core.core.shutdown()


def test_the_reference_chooses_the_same_blocks(sparse):
    core = Core(sparse_attention_blocks=NUM_BLOCKS, attention_backend="torch_reference")
    ((tokens, _),) = answers(core, [PROMPT])
    assert tokens == sparse[0][0]
    core.core.shutdown()


def test_where_all_blocks_fit_attention_is_whole(sparse):
    plain, core = Core(), Core(sparse_attention_blocks=16)
    whole = answers(plain, [PROMPT])
    assert answers(core, [PROMPT]) == whole != sparse
    plain.core.shutdown()
    core.core.shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparse_attention_blocks": 2}, "sparse_attention_blocks"),
        ({"sparse_attention_blocks": 4, "swap_space": 1.0}, "swap_space"),
        ({"sparse_attention_blocks": 4, "tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"sparse_attention_blocks": 4, "speculative_config": {"method": "suffix"}}, "speculative_config"),
        ({"sparse_attention_blocks": 4, "kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
)
def test_what_it_cannot_be_combined_with_is_refused(settings, message):
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        Core(**settings)


def test_blocks_that_change_are_summed_up_anew():
    method, size = BlockTopK(3, BLOCK_SIZE), BLOCK_SIZE
    cache = torch.zeros(2, 8, size, 1, 4)
    summaries = method._summaries_of(cache)

    def read(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        return kv_cache[0, block_ids].transpose(1, 2).float()

    summaries.update(torch.arange(8), read, cache)
    cache[0, 5] = 2.0
    method.blocks_changed(cache, torch.tensor([5]))
    summaries.update(torch.arange(8), read, cache)
    low, high = summaries.of(torch.tensor([4, 5]))
    assert np.array_equal(low[:, 0, 0], [0, 2]) and np.array_equal(high[:, 0, 0], [0, 2])
