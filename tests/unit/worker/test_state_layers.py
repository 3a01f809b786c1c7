"""Models with a recurrent layer run on blocks of the scheduler, and continue from states that others left."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from quire.attention.context import ForwardContext
from quire.config.cache import CacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.core.kv_spec import KVCacheSpec, MambaSpec
from quire.kv_cache.planning import plan_kv_cache
from quire.layers.recurrent_state import state_tensors
from quire.scheduler.scheduler import Scheduler
from tests.unit.scheduler.harness import make_request
from tests.unit.worker import toy_model
from tests.unit.worker.driver import make_runner
from tests.unit.worker.toy_model import VOCAB_SIZE, ToyBackend, ToyModel

BLOCK_SIZE = 4
STATE = MambaSpec(block_size=BLOCK_SIZE, shapes=((2,), (1,)), dtype_bytes=(4, 4))


def next_state(state: list[int], token_id: int) -> list[int]:
    return [(3 * state[0] + token_id + 1) % VOCAB_SIZE, state[0]]


class StateModel(ToyModel):
    """A recurrent layer alone: what is said next follows from its state."""

    layer_idx = 0

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        hidden = -0.5 * torch.arange(VOCAB_SIZE, dtype=torch.float32).repeat(len(input_ids), 1)
        return self.turn(hidden, input_ids, positions, context)

    def turn(
        self, hidden: torch.Tensor, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Advance the states of the step's requests, by which logits are shifted."""
        kv_cache, metadata = context.state(self.layer_idx)
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
                if metadata.token_block is not None and (block := int(metadata.token_block[token])) >= 0:
                    states[block], counts[block] = torch.tensor(state), int(positions[token]) + 1
            states[write], counts[write] = torch.tensor(state), int(positions[end - 1]) + 1
        return hidden

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        return {"mixer": STATE}

    @staticmethod
    def next_token(context: Sequence[int]) -> int:
        state = [0, 0]
        for token_id in context:
            state = next_state(state, token_id)
        return sum(state) % VOCAB_SIZE


class HybridModel(StateModel):
    """The toy of exact attention, whose logits are shifted by a recurrent layer's state."""

    layer_idx = 1

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        attention = ForwardContext(context.metadata[:1], context.kv_caches[:1])
        return self.turn(ToyModel.forward(self, input_ids, positions, attention), input_ids, positions, context)

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        return {**ToyModel.kv_cache_specs(self, block_size), "mixer": STATE}

    @staticmethod
    def next_token(context: Sequence[int]) -> int:
        return (toy_model.next_token(list(context)) + StateModel.next_token(context)) % VOCAB_SIZE


class ToyEngine:
    """Requests of a toy model, run to their ends; each token is checked as it comes."""

    def __init__(
        self, model: StateModel, *, num_blocks: int = 60, checkpoints: int | None = None, max_model_len: int = 120,
        mode: str = "auto", **cache: object,
    ) -> None:  # fmt: skip
        settings = CacheConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            num_state_checkpoints=checkpoints,
            **cache,  # type: ignore[arg-type]
        )
        config = plan_kv_cache(model.kv_cache_specs(BLOCK_SIZE), 10**6, settings, max_model_len, 10, max_num_seqs=4)
        self.model, self.config = model, config
        self.runner = make_runner(
            model, ToyBackend(), vocab_size=VOCAB_SIZE, max_num_seqs=4, max_model_len=max_model_len, config=config
        )
        scheduler_config = SchedulerConfig(max_num_batched_tokens=10, max_num_seqs=4, preemption_mode=mode)
        self.scheduler = Scheduler(scheduler_config, settings, config, max_model_len=max_model_len)
        self.num_preemptions = self.num_computed = self.num_swaps = self.checkpoints = 0
        self.starts: list[int] = []

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int = 9) -> list[list[int]]:
        tokens: dict[int, list[int]] = {handle: [] for handle in range(len(prompts))}
        for handle, prompt in enumerate(prompts):
            self.scheduler.add_request(make_request(handle, prompt, max_tokens=max_tokens, temperature=0.0))
        while (step := self.scheduler.schedule()) is not None:
            self.num_computed += step.output.total_num_scheduled_tokens
            self.starts += step.output.num_computed_tokens.tolist()
            output = self.runner.sample_tokens(self.runner.execute_model(step.output))
            outputs = self.scheduler.update_from_output(step, output)
            self.num_preemptions += outputs.stats.num_preemptions
            self.num_swaps += outputs.stats.num_swap_preemptions
            self.checkpoints = outputs.stats.num_state_checkpoints
            for handle, token in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
                assert token == self.model.next_token([*prompts[handle], *tokens[handle]])
                tokens[handle].append(token)
        assert [len(answer) for answer in tokens.values()] == [max_tokens] * len(prompts)
        assert self.scheduler._kv.usage == 0.0
        return list(tokens.values())


PROMPTS = [[5, 8, 13, handle] * (1 + handle % 3) for handle in range(7)]


@pytest.mark.parametrize("model", [HybridModel(), StateModel()], ids=["hybrid", "states"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_answers_follow_from_the_whole_context_whatever_is_found_in_the_cache(model, caching):
    engine = ToyEngine(model, enable_prefix_caching=caching)
    assert engine.run(PROMPTS) == engine.run(PROMPTS)
    assert engine.num_preemptions == 0


@pytest.mark.parametrize(("mode", "swap_space"), [("recompute", 0.0), ("swap", 2.0**-16)])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_preempted_requests_go_on_with_the_right_states(mode, swap_space, caching):
    engine = ToyEngine(
        HybridModel(), num_blocks=12, mode=mode, swap_space=swap_space, enable_prefix_caching=caching, max_model_len=40
    )
    engine.run(PROMPTS)
    assert engine.num_preemptions > 0
    assert (engine.num_swaps > 0) == (mode == "swap")


@pytest.mark.parametrize("model", [HybridModel(), StateModel()], ids=["hybrid", "states"])
def test_each_turn_of_a_conversation_computes_its_new_tokens_and_less_than_a_block_of_old_ones(model):
    engine = ToyEngine(model, num_blocks=100)
    context = [3 * i % 50 for i in range(37)]
    for turn in range(6):
        engine.num_computed = 0
        (answer,) = engine.run([context], max_tokens=6)
        new_tokens = 37 if not turn else 5
        assert engine.num_computed <= new_tokens + len(answer) + BLOCK_SIZE - (not turn)
        context += [*answer, *(90 - turn - i for i in range(5))]


@pytest.mark.parametrize("model", [HybridModel(), StateModel()], ids=["hybrid", "states"])
def test_what_prompts_have_in_common_is_kept_when_a_second_one_shows_it(model):
    engine = ToyEngine(model)
    shared = list(range(20, 45))  # six blocks and a token
    computed = []
    for i in range(4):
        engine.num_computed = 0
        engine.run([[*shared, *(50 + 7 * i + j for j in range(8))]], max_tokens=1)
        computed.append(engine.num_computed)
    assert computed == [33, 33, 9, 9]


def test_states_are_kept_every_so_many_tokens_where_that_is_set():
    engine = ToyEngine(HybridModel(), prefix_cache_retention_interval=9)  # 8 tokens: whole blocks
    prompt = list(range(20, 50))
    engine.run([prompt], max_tokens=1)
    for num_shared in (7, 8, 15, 23):
        engine.num_computed = 0
        engine.run([[*prompt[:num_shared], *(60 + num_shared + i for i in range(3))]], max_tokens=1)
        assert engine.num_computed == num_shared % 8 + 3


def test_checkpoints_take_no_more_blocks_than_there_are_and_the_least_recently_used_go():
    engine = ToyEngine(HybridModel(), num_blocks=500, checkpoints=0)  # two for each of four requests
    prompts = [[(30 * i + j) % 90 for j in range(21)] for i in range(9)]
    prompts = [[*prompt[: i % 3], i, *prompt] for i, prompt in enumerate(prompts)]
    for prompt in prompts:
        engine.run([prompt], max_tokens=1)
    assert engine.checkpoints == 8
    engine.num_computed = 0
    engine.run([prompts[-1]], max_tokens=1)
    assert engine.num_computed <= BLOCK_SIZE
    engine.num_computed = 0
    engine.run([prompts[0]], max_tokens=1)
    assert engine.num_computed == len(prompts[0])


def test_a_short_prompt_is_not_cut_and_a_long_one_ends_at_its_last_full_block():
    engine = ToyEngine(HybridModel())
    cuts = []
    for length in (17, 18, 30):
        engine.starts = []
        engine.run([[length + i for i in range(length)]], max_tokens=1)
        cuts.append(engine.starts)
    assert cuts == [[0, 10, 16], [0, 10, 16], [0, 10, 20, 28]]
    engine.starts = []
    engine.run([[80 - i for i in range(9)]], max_tokens=1)
    assert engine.starts == [0]


def test_states_are_views_of_their_blocks_bytes():
    cache = torch.zeros(3, 128, dtype=torch.uint8)
    first, second = state_tensors(cache, ((2, 3), (4,)), (torch.float32, torch.bfloat16))
    assert first.shape == (3, 2, 3) and second.shape == (3, 4)
    first[1], second[2] = 1.0, 2.0
    assert np.flatnonzero(cache.any(dim=1).numpy()).tolist() == [1, 2]
    assert cache[1, :24].view(torch.float32).tolist() == [1.0] * 6 and not cache[1, 24:].any()
    assert cache[2, 64:72].view(torch.bfloat16).tolist() == [2.0] * 4 and not cache[2, :64].any()
