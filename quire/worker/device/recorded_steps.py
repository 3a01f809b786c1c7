"""RecordedSteps: steps of few tokens as recorded kernel calls: one graph, replayed with as many tokens as a step has.

Called by the model runner. Owns the graphs, their inputs at fixed addresses and the arena of their results. Before the
first step the model is called on the largest one and on two others, without running any kernel: what differs between
the three are numbers of tokens (`StepGraph.generalize`). The first step of one token, and the first of several, run
both ways and are compared bit for bit; all others are replayed. A model that computes anything beside the recorded
kernels stays call by call. Steps with few tokens whose hidden states are asked for, those with chunks of prompts, have
a graph of their own, as the last layer's feed-forward network is for these tokens alone.

A step of n tokens is recorded with n requests, so that decodes, drafts, prompts and mixtures of them are alike:
requests that the step does not have are without tokens, which attention passes over. Two drafts beside a decode:

    query_start_loc  0 3 4 | 4 4
    seq_lens         9 6   | 0 0
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from quire.attention.metadata import AttentionMetadata, StateMetadata
from quire.core.memory_budget import RECORDED_STEPS_BYTES
from quire.core.scheduler_output import StateBlocks
from quire.errors import ShapeError
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.step_graph import GraphArena, Place, StepGraph
from quire.logger import get_logger
from quire.worker.attention_groups import AttentionGroups, make_state_metadata
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import StepGraphs, StepModel
from quire.worker.device.operation_watch import OperationWatch
from quire.worker.input_batch import InputBatch

logger = get_logger(__name__)

# Larger steps spend little of their time between kernels; of some models fewer tokens fill the arena.
MAX_TOKENS = 256
MIN_TOKENS = 8
# Tokens, and those whose hidden states are asked for, of steps that are recorded beside the largest one. No kernel has
# tiles of seven or five rows, no two sizes have the ratio of others, and one row alone has other strides.
OTHER_SIZES = ((7, 3), (5, 2))
ARENA_BYTES = RECORDED_STEPS_BYTES

Sizes = tuple[int, ...]
"""Tokens of a step, and how many of them are asked for where these are few."""


@dataclass(frozen=True, slots=True)
class _Captured:
    """Steps of up to `max_tokens` tokens: `hidden` is where the results of the largest appear.

    Attributes:
        proven: kinds of steps, by which of their sizes are more than one, whose replays gave the model's bits.
    """

    graph: StepGraph
    hidden: torch.Tensor
    max_tokens: int
    proven: set[tuple[bool, ...]]

    def hidden_of(self, num_tokens: int) -> torch.Tensor:
        """The results of a step; heads may have several rows for each token."""
        return self.hidden[: len(self.hidden) // self.max_tokens * num_tokens]


class RecordedSteps(StepGraphs):
    """Runs the model on steps of few tokens by native kernels on a CPU.

    Args:
        runtime: of the model's layers and its attention.
        max_tokens: of a step that is recorded.
        vocab_size: ids are below it.
        agree: whether it is so on all ranks that compute the steps, which must all replay the same ones.
    """

    def __init__(
        self,
        runtime: NativeRuntime,
        model: StepModel,
        attention: AttentionGroups,
        block_tables: BlockTables,
        max_tokens: int = MAX_TOKENS,
        *,
        vocab_size: int,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._attention = attention
        self._block_tables = block_tables
        self._vocab_size = vocab_size
        self._agree = agree
        self._arena = GraphArena(ARENA_BYTES)
        # By whether few tokens are asked for; None = these steps cannot be captured.
        self._captured: dict[bool, _Captured | None] = {}
        self.max_tokens = size = max_tokens
        self._input_ids = np.zeros(size, dtype=np.int64)
        self._positions = np.zeros(size, dtype=np.int64)
        self._query_start_loc = np.arange(size + 1, dtype=np.int32)
        self._seq_lens = np.zeros(size, dtype=np.int32)
        self._tables = [np.zeros((size, table.shape[1]), dtype=np.int32) for table in block_tables.tables]
        self._slots = [np.zeros(size, dtype=np.int64) for _ in block_tables.tables]
        self._wanted = np.zeros(size, dtype=np.int64)
        self._num_computed_tokens = np.zeros(size, dtype=np.int32)
        self._states = [
            StateBlocks(np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32))
            for group, has_state in enumerate(block_tables.has_state)
            if has_state and group in attention.groups
        ]

    def forward(self, batch: InputBatch, wanted: np.ndarray | None = None) -> torch.Tensor | None:
        """Hidden states [num_tokens, hidden_size] of a small step, valid until the next step; None = not one of these.

        Writes the step's keys and values, as the model does.
        """
        self.is_capture, size = False, batch.num_tokens
        if size > self.max_tokens or self._runtime.is_profiled:
            return None
        if batch.states and not (size == batch.num_reqs and batch.num_computed_tokens.all()):
            return None  # recurrent layers are recorded one token on from a state
        is_few = wanted is not None
        captured = self._captured[is_few] if is_few in self._captured else self._capture(is_few=is_few)
        if captured is None or size > captured.max_tokens:
            return None
        self._load(batch)
        sizes: Sizes = (size,)
        if wanted is not None:
            num_wanted = max(1, len(wanted))  # where none is, any
            self._wanted[:num_wanted] = wanted if len(wanted) else 0
            sizes = (size, num_wanted)
        if tuple(one > 1 for one in sizes) not in captured.proven:
            return self._prove(sizes, captured)
        captured.graph.replay(sizes)
        return captured.hidden_of(size)

    def _load(self, batch: InputBatch) -> None:
        """Put the step's inputs where graphs read them."""
        size, num_reqs, input_ids = batch.num_tokens, batch.num_reqs, batch.input_ids.numpy()
        if int(input_ids.min()) < 0 or int(input_ids.max()) >= self._vocab_size:
            raise ShapeError(f"a token id is outside the vocabulary of {self._vocab_size}", field="input_ids")
        self._input_ids[:size] = input_ids
        self._positions[:size] = batch.token_positions
        self._query_start_loc[: num_reqs + 1] = batch.query_start_loc
        self._seq_lens[:num_reqs] = batch.seq_lens
        if num_reqs < size:
            self._query_start_loc[num_reqs + 1 : size + 1] = size
            self._seq_lens[num_reqs:size] = 0
        max_seq_len = int(batch.seq_lens.max())
        self._num_computed_tokens[:num_reqs] = batch.num_computed_tokens
        own_states = (batch.states[number] for number in self._attention.state_numbers)
        for fixed, states in zip(self._states, own_states, strict=True):
            fixed.read_block_ids[:size] = states.read_block_ids
            fixed.write_block_ids[:size] = states.write_block_ids
        for group, (table, slots) in enumerate(zip(self._tables, self._slots, strict=True)):
            if self._block_tables.has_state[group] or group not in self._attention.groups:
                continue
            blocks = self._block_tables.gather(group, batch.rows, max_seq_len)
            table[:num_reqs, : blocks.shape[1]] = blocks
            slots[:size] = self._block_tables.slots(group, batch.token_rows, batch.token_positions)

    def _capture(self, *, is_few: bool) -> _Captured | None:
        """Record steps of as many tokens as can be; None = those of the model cannot."""
        size = self.max_tokens
        self._captured[is_few] = None
        while size >= MIN_TOKENS:
            watch = OperationWatch()
            captured = self._record((size, size // 2)[: 1 + is_few], watch)
            if self._agree(captured is not None):
                self._captured[is_few] = captured
                if not is_few:
                    self.max_tokens = size
                return captured
            if not self._agree(not watch.names):
                names = ", ".join(sorted(watch.names)) or "something on another rank"
                logger.warning("steps are not captured: besides its kernels the model computes %s", names)
                self.max_tokens = 0
                return None
            size //= 2
        logger.warning("steps are not captured: they have other calls for other numbers of tokens, or no room")
        self.max_tokens = 0
        return None

    def _record(self, sizes: Sizes, watch: OperationWatch) -> _Captured | None:
        """The calls of a step of these sizes, which serve smaller ones; None = they have no room, are others for fewer
        tokens, or are not all that the model computes: what it does besides is in `watch`.
        """
        graph = StepGraph(self._runtime, self._arena, is_run=False)
        with graph.recording():
            hidden = self._run(sizes, watch)
        if self._arena.has_overflowed:
            watch.names.clear()  # it took memory elsewhere
            return None
        if not self._arena.holds(hidden):
            watch.names.add("its result elsewhere")
        if watch.names:
            return None
        places = self._arena.places
        others = [self._record_other(other[: len(sizes)], places) for other in OTHER_SIZES]
        return _Captured(graph, hidden, sizes[0], set()) if graph.generalize(sizes, others) else None

    def _record_other(self, sizes: Sizes, places: list[Place]) -> tuple[StepGraph, Sizes]:
        """The calls for a smaller step, whose results go where those of the largest one do."""
        graph = StepGraph(self._runtime, self._arena, is_run=False)
        with graph.recording(places):
            self._run(sizes)
        return graph, sizes

    def _prove(self, sizes: Sizes, captured: _Captured) -> torch.Tensor:
        self.is_capture, size = True, sizes[0]
        put_back = self._attention.remember_states([_first(states, size) for states in self._states])
        captured.graph.replay(sizes)
        put_back()  # what a step has read is read again
        index = slice(None) if len(sizes) == 1 else self._wanted[: sizes[1]]
        replayed = captured.hidden_of(size)[index]
        hidden = self._run(sizes)  # last, so that the cache holds what it wrote, whatever the replay did
        if self._agree(torch.equal(hidden[index].view(torch.uint8), replayed.view(torch.uint8))):
            captured.proven.add(tuple(one > 1 for one in sizes))
        else:
            logger.warning("steps are not captured: a replay of %d tokens gave different bits", size)
            self.max_tokens = 0
        return hidden

    def _run(self, sizes: Sizes, watch: OperationWatch | None = None) -> torch.Tensor:
        """The model, call by call, on the inputs of the graphs."""
        size = sizes[0]
        states = iter(self._states)
        metadata = {
            group: self._state_metadata(size, next(states)) if has_state else self._metadata(size, group)
            for group, has_state in enumerate(self._block_tables.has_state)
            if group in self._attention.groups
        }
        input_ids, positions = torch.from_numpy(self._input_ids[:size]), torch.from_numpy(self._positions[:size])
        context = self._attention.context_of(metadata)
        if len(sizes) > 1:
            context = replace(context, wanted=torch.from_numpy(self._wanted[: sizes[1]]))
        with watch or nullcontext():
            return self._model.forward(input_ids, positions, context)

    def _metadata(self, size: int, group: int) -> AttentionMetadata:
        query_start_loc, seq_lens = self._query_start_loc[: size + 1], self._seq_lens[:size]
        return AttentionMetadata(
            num_reqs=size,
            num_tokens=size,
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=torch.from_numpy(self._tables[group][:size]),
            slot_mapping=torch.from_numpy(self._slots[group][:size]),
            query_start_loc_np=query_start_loc,
            seq_lens_np=seq_lens,
            max_query_len=int(np.diff(query_start_loc).max()),
            max_seq_len=int(seq_lens.max()),
        )

    def _state_metadata(self, size: int, states: StateBlocks) -> StateMetadata:
        query_start_loc, num_computed_tokens = self._query_start_loc[: size + 1], self._num_computed_tokens[:size]
        return make_state_metadata(query_start_loc, num_computed_tokens, _first(states, size), torch.device("cpu"))


def _first(states: StateBlocks, size: int) -> StateBlocks:
    """Of the first `size` requests, in the same memory."""
    return StateBlocks(states.read_block_ids[:size], states.write_block_ids[:size])
