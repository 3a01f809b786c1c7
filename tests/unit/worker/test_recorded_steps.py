"""Recorded steps: replayed with other inputs, proven before they are trusted, refused where they cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.attention.context import ForwardContext
from quire.attention.metadata import AttentionMetadata
from quire.core.kv_spec import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from quire.core.scheduler_output import StateBlocks
from quire.errors import ShapeError
from quire.kernels.native import elementwise, linear, rows
from quire.kernels.native.causal_conv import causal_conv
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.step_graph import GraphArena, StepGraph
from quire.kernels.recurrent import RecurrentBatch
from quire.layers.recurrent_state import state_tensors
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device import recorded_steps
from quire.worker.device.graphs import NoGraphs
from quire.worker.device.recorded_steps import RecordedSteps
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache_tensors import CachePool
from quire.worker.warmup import capture_steps

VOCAB, SIZE = 48, 32
NUM_RECORDINGS = 1 + len(recorded_steps.OTHER_SIZES)


class Tables:
    """Block tables of one group: of row r block r + 1."""

    tables = (np.zeros((8, 4), dtype=np.int32),)
    has_state = (False,)

    def gather(self, group: int, rows: np.ndarray, max_seq_len: int) -> np.ndarray:
        return rows[:, None] + 1

    def slots(self, group: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.zeros(len(rows), dtype=np.int64)


class Attention:
    """Keeps what it was given last."""

    groups = frozenset({0})
    state_numbers = ()
    metadata: AttentionMetadata

    def context_of(self, per_group: Any) -> ForwardContext:
        self.metadata = per_group[0]
        return ForwardContext((self.metadata,), ())

    def remember_states(self, states: Any) -> Callable[[], None]:
        return lambda: None


class Model:
    """Looks tokens up and normalises them, by kernels alone unless told otherwise."""

    def __init__(self, runtime: NativeRuntime, beside: str = "") -> None:
        self.runtime, self.beside, self.num_calls = runtime, beside, 0
        self.table = torch.zeros(linear.packed_shape(VOCAB, SIZE, torch.float32))
        linear.pack_rows(runtime, torch.randn(VOCAB, SIZE, generator=torch.Generator().manual_seed(1)), self.table, 0)
        self.weight = torch.rand(SIZE, generator=torch.Generator().manual_seed(2))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: Any) -> torch.Tensor:
        self.num_calls += 1
        x = linear.gather_rows(self.runtime, input_ids, self.table, SIZE)
        if self.beside == "more for many" and len(x) > 64:
            x = elementwise.rms_norm(self.runtime, x, self.weight, 1e-5)
        if self.beside == "whole tiles":
            x = elementwise.rms_norm(self.runtime, x.view(-1)[: len(x) // 2 * SIZE].view(-1, SIZE), self.weight, 1e-5)
        if self.beside == "between":
            x = x * (1 + positions[:, None])
        if self.beside == "a copy":
            x = x.view(len(x), 2, -1).transpose(1, 2).reshape(len(x), -1)
        if self.beside == "few" and context is not None and context.wanted is not None:
            x = elementwise.rms_norm(self.runtime, rows.take_rows(self.runtime, x, context.wanted), self.weight, 1e-5)
            return rows.put_rows(self.runtime, x, context.wanted, len(input_ids))
        x = elementwise.rms_norm(self.runtime, x, self.weight, 1e-5)
        if self.beside == "two rows each":
            return x.view(-1, SIZE // 2)
        return x * 2 if self.beside == "at the end" else x


def batch(token_ids: list[int], spans: list[int] | None = None) -> InputBatch:
    """Requests that compute a token each, or so many as `spans` says."""
    count = len(token_ids)
    sizes = np.array(spans or [1] * count, dtype=np.int32)
    rows = np.arange(len(sizes), dtype=np.int32)
    start_loc = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    positions = np.arange(count, dtype=np.int64) + sum(token_ids)
    return InputBatch(
        rows=rows, num_computed_tokens=rows, query_start_loc=start_loc,
        seq_lens=rows + sizes, input_ids=torch.tensor(token_ids, dtype=torch.int32),
        positions=torch.from_numpy(positions), token_rows=np.repeat(rows, sizes), token_positions=positions,
        sampling_rows=rows, sampling_positions=rows, logits_indices=start_loc[1:] - 1,
    )  # fmt: skip


def graphs_of(model: Model) -> RecordedSteps:
    return RecordedSteps(model.runtime, model, Attention(), Tables(), vocab_size=VOCAB)  # type: ignore[arg-type]


STEPS = [[3, 7], [5, 5], [0, 47], [9, 1], [2, 3]]


def expected(model: Model, token_ids: list[int]) -> torch.Tensor:
    positions = torch.arange(len(token_ids)) + sum(token_ids)
    return Model(model.runtime, model.beside).forward(torch.tensor(token_ids), positions, None)


def test_a_step_is_recorded_then_proven_then_replayed():
    model = Model(NativeRuntime(num_threads=2))
    graphs = graphs_of(model)
    for i, token_ids in enumerate(STEPS):
        hidden = graphs.forward(batch(token_ids))
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids))
        assert model.num_calls == NUM_RECORDINGS + 1 and graphs.is_capture == (i == 0)


def test_steps_of_all_sizes_replay_one_graph_once_one_token_and_several_are_proven():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    for count in (2, 1, 3, 40, graphs.max_tokens, 5, 1):
        token_ids = [(7 * i + count) % VOCAB for i in range(count)]
        hidden = graphs.forward(batch(token_ids))
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids))
    assert model.num_calls == NUM_RECORDINGS + 2 and graphs.max_tokens == recorded_steps.MAX_TOKENS


def test_steps_with_few_tokens_that_are_asked_for_replay_a_graph_of_their_own():
    model = Model(NativeRuntime(), "few")
    graphs = graphs_of(model)
    for i, (count, few) in enumerate([(9, [8]), (6, [1, 3, 5]), (40, [2, 39]), (3, []), (250, list(range(125)))]):
        token_ids = [(5 * j + i) % VOCAB for j in range(count)]
        hidden = graphs.forward(batch(token_ids, [count]), np.array(few, dtype=np.int64))
        assert hidden is not None and hidden.shape == (count, SIZE)
        assert torch.equal(hidden[few], expected(model, token_ids)[few])
        assert graphs.is_capture == (i < 2)
    hidden = graphs.forward(batch([1, 2, 3]))
    assert hidden is not None and torch.equal(hidden, expected(model, [1, 2, 3]))
    assert model.num_calls == 2 * NUM_RECORDINGS + 2 + 1


def test_results_of_several_rows_for_each_token_are_whole():
    model = Model(NativeRuntime(), "two rows each")
    graphs = graphs_of(model)
    for token_ids in ([3], [4, 5], [6, 7, 8], [9]):
        hidden = graphs.forward(batch(token_ids))
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids))
    assert model.num_calls == NUM_RECORDINGS + 2


def test_where_many_tokens_are_computed_by_other_calls_steps_of_few_are_replayed():
    model = Model(NativeRuntime(), "more for many")
    graphs = graphs_of(model)
    assert graphs.forward(batch([1] * 65)) is None and graphs.max_tokens == 64
    for token_ids in ([2, 3], [1] * 64, [4, 5, 6]):
        hidden = graphs.forward(batch(token_ids))
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids))


def test_a_model_with_sizes_that_are_no_multiples_of_the_tokens_stays_call_by_call():
    graphs = graphs_of(Model(NativeRuntime(), "whole tiles"))
    assert graphs.forward(batch([1, 2])) is None and graphs.max_tokens == 0


@pytest.mark.parametrize("beside", ["between", "a copy", "at the end"])
@torch.inference_mode()  # as the worker does: elsewhere torch takes a `reshape` apart
def test_a_model_that_computes_beside_its_kernels_stays_call_by_call(beside: str):
    model = Model(NativeRuntime(), beside)
    graphs = graphs_of(model)
    assert all(graphs.forward(batch(token_ids)) is None for token_ids in (*STEPS, [1]))
    assert model.num_calls == 1, "what one size met holds for all"


def test_a_replay_with_other_bits_is_given_up():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    graphs.forward(batch([4]))
    model.weight = model.weight + 1  # another address than the recorded one
    second = graphs.forward(batch(STEPS[1]))
    x = linear.gather_rows(model.runtime, torch.tensor(STEPS[1]), model.table, SIZE)
    assert second is not None and torch.equal(second, elementwise.rms_norm(model.runtime, x, model.weight, 1e-5))
    assert graphs.forward(batch(STEPS[2])) is None


def test_steps_that_are_captured_at_start_are_proven_there():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    capture_steps(graphs, torch.device("cpu"))
    for token_ids in ([5], [3, 7], [2, 3, 4]):
        hidden = graphs.forward(batch(token_ids, [len(token_ids)]))
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids)) and not graphs.is_capture
    assert model.num_calls == NUM_RECORDINGS + 2
    capture_steps(NoGraphs(), torch.device("cpu"))


def test_a_replay_that_does_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    graphs = graphs_of(Model(NativeRuntime()))
    monkeypatch.setattr(StepGraph, "replay", lambda graph, sizes: None)
    capture_steps(graphs, torch.device("cpu"))
    assert graphs.forward(batch([3, 7])) is None


def test_what_the_model_writes_is_written_after_a_replay_that_is_compared_with_it(monkeypatch: pytest.MonkeyPatch):
    model, events = Model(NativeRuntime()), list[str]()
    graphs = graphs_of(model)
    graphs.forward(batch([4]))
    forward, replay = model.forward, StepGraph.replay
    monkeypatch.setattr(model, "forward", lambda *args: events.append("model") or forward(*args))
    monkeypatch.setattr(StepGraph, "replay", lambda graph, sizes: events.append("replay") or replay(graph, sizes))
    monkeypatch.setattr(graphs._attention, "remember_states", lambda states: lambda: events.append("put back"))
    graphs.forward(batch(STEPS[1]))
    assert events == ["replay", "put back", "model"]


def test_drafts_and_prompts_are_replayed_by_the_graph_of_as_many_decodes():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    attention: Any = graphs._attention
    for spans in ([1, 1, 1, 1], [3, 1], [1, 2, 1], [4]):
        for captured in graphs._captured.values():
            assert captured is not None
            captured.proven.clear()  # run both ways
        step = batch([5, 6, 7, 8], spans)
        hidden = graphs.forward(step)
        assert hidden is not None and torch.equal(hidden, expected(model, [5, 6, 7, 8]))
        missing = 4 - step.num_reqs
        # Replays read the same memory, so it holds for them, too.
        assert attention.metadata.query_start_loc.tolist() == [*step.query_start_loc.tolist(), *[4] * missing]
        assert attention.metadata.seq_lens.tolist() == [*step.seq_lens.tolist(), *[0] * missing]
        assert attention.metadata.block_table[: step.num_reqs, 0].tolist() == list(range(1, step.num_reqs + 1))


def test_steps_of_too_many_tokens_are_left_alone():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    assert graphs.forward(batch([1] * (recorded_steps.MAX_TOKENS + 1))) is None
    assert graphs.forward(batch([1] * (recorded_steps.MAX_TOKENS + 1), [recorded_steps.MAX_TOKENS + 1])) is None
    assert model.num_calls == 0


def test_a_step_whose_results_do_not_fit_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded_steps, "ARENA_BYTES", 2 * 16 * SIZE * 4)
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    assert graphs.forward(batch([1] * 17)) is None and graphs.max_tokens == 16
    for token_ids in ([1] * 16, [4], [5], [6, 7]):
        hidden = graphs.forward(batch(token_ids))
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids))


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_ids_outside_the_vocabulary_are_refused_before_a_replay(token_id: int):
    graphs = graphs_of(Model(NativeRuntime()))
    for token_ids in STEPS[:3]:
        graphs.forward(batch(token_ids))
    with pytest.raises(ShapeError, match="vocabulary of 48"):
        graphs.forward(batch([0, token_id]))


def test_a_recording_ends_with_the_step_that_failed():
    runtime = NativeRuntime()
    graph, arena = StepGraph(runtime, GraphArena(1 << 12)), GraphArena(1 << 12)
    with pytest.raises(RuntimeError), graph.recording():
        raise RuntimeError
    other = StepGraph(runtime, arena)
    with other.recording():
        elementwise.rms_norm(runtime, torch.ones(1, 4), torch.ones(4), 1e-5)
    elementwise.rms_norm(runtime, torch.ones(1, 4), torch.ones(4), 1e-5)
    assert (graph.num_calls, other.num_calls, runtime.scratch) == (0, 1, None)


def test_memory_of_an_arena_is_used_again_once_no_tensor_is_left_in_it():
    arena = GraphArena(4096)
    first = arena.empty((4, 16), torch.float32)
    view, second = first[1:], arena.empty((10,), torch.int64)
    assert not second.any() and arena.holds(first) and arena.holds(view)
    del first
    assert arena.empty((8,), torch.bfloat16).data_ptr() > second.data_ptr(), "a view is left"
    del view
    assert arena.empty((5,), torch.float32).data_ptr() < second.data_ptr()
    assert [place for place, _ in arena.places] == [0, 256, 384, 0] and not arena.has_overflowed
    places = arena.places
    arena.reset(places)
    assert arena.holds(arena.empty((2, 16), torch.float32)) and not arena.holds(arena.empty((40,), torch.int64))
    assert arena.has_overflowed, "a result is larger than that of the larger step"


def test_one_step_is_recorded_at_a_time():
    runtime = NativeRuntime()
    one, two = (StepGraph(runtime, GraphArena(1 << 12)) for _ in range(2))
    with one.recording():
        with pytest.raises(ValueError, match="another step"), two.recording():
            pass
        elementwise.rms_norm(runtime, torch.ones(1, 4), torch.ones(4), 1e-5)
    assert one.num_calls == 1


class RecurrentModel(Model):
    """Normalises what a convolution over the newest tokens makes of them."""

    spec = MambaSpec(block_size=4, shapes=((2, SIZE),), dtype_bytes=(4,))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        self.num_calls += 1
        kv_cache, metadata = context.state(0)
        (states,) = state_tensors(kv_cache, self.spec.shapes, (torch.float32,))
        steps = RecurrentBatch(metadata.query_start_loc, metadata.read_block, metadata.write_block)
        x = linear.gather_rows(self.runtime, input_ids, self.table, SIZE)
        weight = self.weight.repeat(3, 1) if not hasattr(self, "taps") else self.taps
        self.taps = weight
        return causal_conv(self.runtime, x, weight, None, states, steps, has_silu=False)


def test_a_step_that_advances_states_is_proven_on_the_states_that_it_read():
    model = RecurrentModel(NativeRuntime())
    group = KVCacheGroupSpec(layer_names=("mixer",), spec=model.spec)
    config = KVCacheConfig(num_blocks=9, groups=(group,))
    tables = BlockTables(config, 8, 40)
    caches = [torch.zeros(9, model.spec.page_size_bytes, dtype=torch.uint8) for _ in range(2)]
    attention, other = (AttentionGroups(config, ["mixer"], [one], [CachePool((one,), 0, 9)]) for one in caches)
    graphs = RecordedSteps(model.runtime, model, attention, tables, vocab_size=VOCAB)
    for i, token_ids in enumerate([[3, 7], *STEPS, *STEPS]):
        blocks = (1 + i // 4, 5 + i // 4)  # after every fourth step they go on in other blocks
        reads = (1 + (i - 1) // 4, 5 + (i - 1) // 4) if i else (-1, -1)
        step = dataclasses.replace(
            batch(token_ids), num_computed_tokens=np.full(2, i, dtype=np.int32),
            states=(StateBlocks(np.array(reads, dtype=np.int32), np.array(blocks, dtype=np.int32)),),
        )  # fmt: skip
        hidden = graphs.forward(step)
        by_call = model.forward(step.input_ids, step.positions, other.forward_context(step, tables))
        assert (hidden is None) == (i == 0), "what begins anew is left alone"
        if hidden is None:
            model.forward(step.input_ids, step.positions, attention.forward_context(step, tables))
        assert hidden is None or torch.equal(hidden, by_call)
        assert torch.equal(*caches)
    assert model.num_calls == 11 + 1 + NUM_RECORDINGS + 1, "recorded, proven, then replayed"


def test_recurrent_layers_with_several_tokens_of_a_request_are_left_alone():
    model = RecurrentModel(NativeRuntime())
    graphs = graphs_of(model)
    one = StateBlocks(np.array([1], dtype=np.int32), np.array([1], dtype=np.int32))
    step = dataclasses.replace(batch([3, 7], [2]), num_computed_tokens=np.full(1, 4, dtype=np.int32), states=(one,))
    assert graphs.forward(step) is None
