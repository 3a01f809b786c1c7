"""RecordedSteps: steps of few tokens as recorded kernel calls, one graph for each number of tokens.

Called by the model runner. Owns the graphs, their inputs at fixed addresses and the arena of their results. The first
step of a size is recorded while it runs, the second runs both ways and is compared bit for bit, later ones are
replayed. A model that computes anything beside the recorded kernels stays call by call.

A graph of n tokens has n requests, so that it serves decodes, drafts and short chunks of prompts alike: requests that
the step does not have are without tokens, which attention passes over. Two drafts of one request beside a decode:

    query_start_loc  0 3 4 | 4 4
    seq_lens         9 6   | 0 0
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention.metadata import AttentionMetadata, StateMetadata
from quire.core.memory_budget import RECORDED_STEPS_BYTES
from quire.core.scheduler_output import StateBlocks
from quire.errors import ShapeError
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.step_graph import GraphArena, StepGraph
from quire.logger import get_logger
from quire.worker.attention_groups import AttentionGroups, make_state_metadata
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import StepGraphs, StepModel
from quire.worker.device.operation_watch import OperationWatch
from quire.worker.input_batch import InputBatch

logger = get_logger(__name__)

# Larger steps spend little of their time between kernels; of large models fewer tokens fill the arena.
MAX_TOKENS = 256
# Of prompts: chunks that are so short that there will be others of their length.
MAX_CHUNK = 8
ARENA_BYTES = RECORDED_STEPS_BYTES


@dataclass(slots=True)
class _Recorded:
    """A recorded step; `hidden` is where its result appears."""

    graph: StepGraph
    hidden: torch.Tensor
    is_proven: bool = False


class RecordedSteps(StepGraphs):
    """Runs the model on steps of few tokens by native kernels on a CPU.

    Args:
        runtime: of the model's layers and its attention.
        vocab_size: ids are below it.
        agree: whether it is so on all ranks that compute the steps, which must all replay the same ones.
    """

    def __init__(
        self,
        runtime: NativeRuntime,
        model: StepModel,
        attention: AttentionGroups,
        block_tables: BlockTables,
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
        self._recorded: dict[int, _Recorded] = {}
        self._refused: set[int] = set()
        self._max_tokens = size = MAX_TOKENS
        self._input_ids = np.zeros(size, dtype=np.int64)
        self._positions = np.zeros(size, dtype=np.int64)
        self._query_start_loc = np.arange(size + 1, dtype=np.int32)
        self._seq_lens = np.zeros(size, dtype=np.int32)
        self._tables = [np.zeros((size, table.shape[1]), dtype=np.int32) for table in block_tables.tables]
        self._slots = [np.zeros(size, dtype=np.int64) for _ in block_tables.tables]
        self._num_computed_tokens = np.zeros(size, dtype=np.int32)
        self._states = [
            StateBlocks(np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32))
            for group, has_state in enumerate(block_tables.has_state)
            if has_state and group in attention.groups
        ]

    def forward(self, batch: InputBatch) -> torch.Tensor | None:
        """Hidden states [num_tokens, hidden_size] of a small step, valid until the next step; None = not one of these.

        Writes the step's keys and values, as the model does. Decodes and drafts are captured, and short prompts, which
        replay what these have left: a graph costs two steps more.
        """
        self.is_capture, size = False, batch.num_tokens
        if size > self._max_tokens or size in self._refused or self._runtime.is_profiled:
            return None
        if batch.states and not (size == batch.num_reqs and batch.num_computed_tokens.all()):
            return None  # recurrent layers are recorded one token on from a state
        recorded = self._recorded.get(size)
        is_ready = recorded is not None and recorded.is_proven
        if not is_ready and len(batch.logits_indices) < size and np.diff(batch.query_start_loc).max() > MAX_CHUNK:
            return None
        self._load(batch)
        self.is_capture = not is_ready
        if recorded is None:
            return self._record(size)
        if not is_ready:
            return self._prove(size, recorded)
        recorded.graph.replay()
        return recorded.hidden

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

    def _record(self, size: int) -> torch.Tensor:
        graph, watch = StepGraph(self._runtime, self._arena), OperationWatch()
        with graph.recording():
            hidden = self._run(size, watch)
        is_whole = not watch.names and self._arena.holds(hidden)
        has_room = not self._arena.has_overflowed
        if self._agree(has_room and is_whole):
            self._recorded[size] = _Recorded(graph, hidden)
        elif self._agree(is_whole or not has_room):
            self._refused.add(size)
        else:
            if not is_whole:
                names = ", ".join(sorted(watch.names)) or "its result elsewhere"
                logger.warning("steps are not captured: besides its kernels the model computes %s", names)
            self._max_tokens = 0
        return hidden

    def _prove(self, size: int, recorded: _Recorded) -> torch.Tensor:
        put_back = self._attention.remember_states([_first(states, size) for states in self._states])
        recorded.graph.replay()
        put_back()  # what a step has read is read again
        expected = self._run(size)  # last, so that the cache holds what it wrote, whatever the replay did
        recorded.is_proven = self._agree(torch.equal(expected.view(torch.uint8), recorded.hidden.view(torch.uint8)))
        if not recorded.is_proven:
            logger.warning("steps of %d tokens are not captured: a replay gave different bits", size)
            del self._recorded[size]
            self._refused.add(size)
        return expected

    def _run(self, size: int, watch: OperationWatch | None = None) -> torch.Tensor:
        """The model, call by call, on the inputs of the graphs."""
        states = iter(self._states)
        metadata = {
            group: self._state_metadata(size, next(states)) if has_state else self._metadata(size, group)
            for group, has_state in enumerate(self._block_tables.has_state)
            if group in self._attention.groups
        }
        input_ids, positions = torch.from_numpy(self._input_ids[:size]), torch.from_numpy(self._positions[:size])
        context = self._attention.context_of(metadata)
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
