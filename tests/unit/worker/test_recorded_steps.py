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
from quire.kernels.native import elementwise, linear
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

    def context_of(self, per_group: Any) -> None:
        self.metadata = per_group[0]

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
        if self.beside == "between":
            x = x * (1 + positions[:, None])
        if self.beside == "a copy":
            x = x.view(len(x), 2, -1).transpose(1, 2).reshape(len(x), -1)
        x = elementwise.rms_norm(self.runtime, x, self.weight, 1e-5)
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
    return RecordedSteps(model.runtime, model, Attention(), Tables(), VOCAB)  # type: ignore[arg-type]


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
        assert model.num_calls == min(i + 1, 2)


def test_each_number_of_requests_has_a_graph_of_its_own():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    for token_ids in ([1], [2, 3], [4, 5, 6]) * 4:
        hidden = graphs.forward(batch(token_ids))
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids))
    assert model.num_calls == 6


@pytest.mark.parametrize("beside", ["between", "a copy", "at the end"])
@torch.inference_mode()  # as the worker does: elsewhere torch takes a `reshape` apart
def test_a_model_that_computes_beside_its_kernels_stays_call_by_call(beside: str):
    model = Model(NativeRuntime(), beside)
    graphs = graphs_of(model)
    first = graphs.forward(batch(STEPS[0]))
    assert first is not None and torch.equal(first, expected(model, STEPS[0]))
    assert all(graphs.forward(batch(token_ids)) is None for token_ids in STEPS[1:])
    assert graphs.forward(batch([1])) is None, "what one size met holds for all"


def test_a_replay_with_other_bits_is_given_up():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    graphs.forward(batch(STEPS[0]))
    model.weight = model.weight + 1  # another address than the recorded one
    second = graphs.forward(batch(STEPS[1]))
    x = linear.gather_rows(model.runtime, torch.tensor(STEPS[1]), model.table, SIZE)
    assert second is not None and torch.equal(second, elementwise.rms_norm(model.runtime, x, model.weight, 1e-5))
    assert graphs.forward(batch(STEPS[2])) is None


def test_steps_with_drafts_are_captured_at_start_for_as_long_as_that_may_take():
    model = Model(NativeRuntime())
    graphs, times = graphs_of(model), iter([0.0, 0.5, 1.0])
    assert capture_steps(graphs, [1, 2, 3], torch.device("cpu"), clock=lambda: next(times)) == 2
    for token_ids in ([5], [3, 7]):
        hidden = graphs.forward(batch(token_ids, [len(token_ids)]))
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids)) and not graphs.is_capture
    assert model.num_calls == 4 and capture_steps(NoGraphs(), [1, 2], torch.device("cpu")) == 0


def test_a_replay_at_start_that_would_only_leave_what_was_captured_is_given_up(monkeypatch: pytest.MonkeyPatch):
    graphs = graphs_of(Model(NativeRuntime()))
    monkeypatch.setattr(StepGraph, "replay", lambda graph: None)
    capture_steps(graphs, [2], torch.device("cpu"))
    assert graphs.forward(batch([3, 7])) is None


def test_what_the_model_writes_is_written_after_a_replay_that_is_compared_with_it(monkeypatch: pytest.MonkeyPatch):
    model, events = Model(NativeRuntime()), list[str]()
    graphs = graphs_of(model)
    graphs.forward(batch(STEPS[0]))
    forward, replay = model.forward, StepGraph.replay
    monkeypatch.setattr(model, "forward", lambda *args: events.append("model") or forward(*args))
    monkeypatch.setattr(StepGraph, "replay", lambda graph: events.append("replay") or replay(graph))
    monkeypatch.setattr(graphs._attention, "remember_states", lambda states: lambda: events.append("put back"))
    graphs.forward(batch(STEPS[1]))
    assert events == ["replay", "put back", "model"]


def test_drafts_and_short_prompts_are_replayed_by_the_graph_of_as_many_decodes():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    attention: Any = graphs._attention
    steps = [([1, 2, 3, 4], None), ([5, 6, 7, 8], [3, 1]), ([9, 1, 2, 3], [1, 2, 1]), ([4, 5, 6, 7], [4])]
    for i, (token_ids, spans) in enumerate(steps):
        step = batch(token_ids, spans)
        hidden = graphs.forward(step)
        assert hidden is not None and torch.equal(hidden, expected(model, token_ids))
        missing = 4 - step.num_reqs
        # Replays read the same memory, so it holds for them, too.
        assert attention.metadata.query_start_loc.tolist() == [*step.query_start_loc.tolist(), *[4] * missing]
        assert attention.metadata.seq_lens.tolist() == [*step.seq_lens.tolist(), *[0] * missing]
        assert attention.metadata.block_table[: step.num_reqs, 0].tolist() == list(range(1, step.num_reqs + 1))
        assert model.num_calls == min(i + 1, 2)


def test_steps_of_too_many_tokens_are_left_alone():
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    assert graphs.forward(batch([1] * (recorded_steps.MAX_TOKENS + 1))) is None
    assert graphs.forward(batch([1] * (recorded_steps.MAX_TOKENS + 1), [recorded_steps.MAX_TOKENS + 1])) is None
    assert model.num_calls == 0


def test_a_step_whose_results_do_not_fit_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded_steps, "ARENA_BYTES", 2 * SIZE * 4)
    model = Model(NativeRuntime())
    graphs = graphs_of(model)
    first = graphs.forward(batch([1, 2]))
    assert first is not None and torch.equal(first, expected(model, [1, 2]))
    assert graphs.forward(batch([1, 2])) is None
    for token_ids in ([4], [5], [6]):
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
    graphs = RecordedSteps(model.runtime, model, attention, tables, VOCAB)
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
    assert model.num_calls == 11 + 1 + 2, "recorded, proven, then replayed"


def test_recurrent_layers_with_several_tokens_of_a_request_are_left_alone():
    model = RecurrentModel(NativeRuntime())
    graphs = graphs_of(model)
    one = StateBlocks(np.array([1], dtype=np.int32), np.array([1], dtype=np.int32))
    step = dataclasses.replace(batch([3, 7], [2]), num_computed_tokens=np.full(1, 4, dtype=np.int32), states=(one,))
    assert graphs.forward(step) is None
