"""RecordedChains: a model that drafts token by token as recorded kernel calls, all passes of a chain replayed at once.

Made with a drafting model, called in its place behind the pass that computes what is missing. Owns the graphs, their
inputs at fixed addresses and the arena of their results. Of each number of rows there is one chain; its pass i gives
token i, and takes in token i - 1 (heads that draft all tokens at once have one pass, with a line for each):

    logits of the hidden states that are given -> token 0
    token 0 at `positions` -> hidden states, logits -> token 1
    token 1 at `positions` + 1 -> ...

A chain is recorded and compared with its replay bit for bit at start; without that it is not used.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import numpy as np
import torch

from quire.attention.metadata import AttentionMetadata
from quire.core.memory_budget import RECORDED_STEPS_BYTES
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.step_chain import StepChain
from quire.kernels.native.step_graph import GraphArena, StepGraph
from quire.logger import get_logger
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.draft_chains import ChainModel, ChainTokens, DraftChains
from quire.worker.device.operation_watch import OperationWatch

logger = get_logger(__name__)

MAX_ROWS = 4
"""Of a chain: with more rows, less of the time is spent between kernels."""


class RecordedChains(DraftChains):
    """Runs chains by native kernels on a CPU.

    Args:
        runtime: of the model's layers and its attention.
        num_drafts: most tokens of a chain.
    """

    def __init__(
        self,
        runtime: NativeRuntime,
        model: ChainModel,
        attention: AttentionGroups,
        block_tables: BlockTables,
        num_drafts: int,
    ) -> None:
        self._runtime = runtime
        self._model = model
        self._attention = attention
        self._block_tables = block_tables
        self._num_drafts = num_drafts
        rows = self._max_rows = min(MAX_ROWS, len(block_tables.tables[0]))
        self._arena = GraphArena(RECORDED_STEPS_BYTES)
        self._graphs: dict[int, list[StepGraph]] = {}
        self._tokens = StepChain(runtime, num_drafts, rows * model.num_places)
        self._hidden = torch.zeros(rows, *model.hidden_shape, dtype=model.dtype)
        self._query_start_loc = np.arange(rows + 1, dtype=np.int32)
        # Of each pass but the first.
        self._positions = np.zeros((num_drafts, rows), dtype=np.int64)
        self._seq_lens = np.zeros((num_drafts, rows), dtype=np.int32)
        self._slots = {group: np.zeros((num_drafts, rows), dtype=np.int64) for group in attention.groups}
        self._tables = {
            group: np.zeros((rows, block_tables.tables[group].shape[1]), dtype=np.int32) for group in attention.groups
        }

    def capture(self, seconds: float) -> None:
        """As `DraftChains`, on blocks that no request has yet."""
        end = time.perf_counter() + seconds
        num_blocks = self._attention.num_blocks if self._num_drafts > 1 else self._max_rows
        for num_rows in range(1, min(self._max_rows, num_blocks) + 1):
            if not self._capture(num_rows) or time.perf_counter() >= end:
                return

    def run(
        self, hidden: torch.Tensor, rows: np.ndarray, positions: np.ndarray, most: np.ndarray, least_chance: float
    ) -> ChainTokens | None:
        """As `DraftChains`."""
        n = len(rows)
        graphs = self._graphs.get(n)
        if graphs is None or self._runtime.is_profiled:
            return None
        self._hidden[:n].copy_(hidden)
        if len(graphs) > 1:
            self._load(rows, positions, most)
        num_run = self._tokens.replay(graphs, most, least_chance)
        return self._found(num_run, n * self._model.num_places)

    def _found(self, num_run: int, num_lines: int) -> ChainTokens:
        scores = np.minimum(np.exp(self._tokens.logprobs[:num_run, :num_lines]), np.float32(1.0))
        token_ids = self._tokens.token_ids[:num_run, :num_lines]
        is_number = scores > 0  # NaN is not
        if np.count_nonzero(is_number) < is_number.size:
            scores, token_ids = np.where(is_number, scores, 0.0), np.where(is_number, token_ids, -1)
        return ChainTokens(token_ids, scores)

    def _load(self, rows: np.ndarray, positions: np.ndarray, most: np.ndarray) -> None:
        """Put the places of all passes where graphs read them; passes that a row does not want write nothing."""
        n, num_passes = len(rows), int(most.max())
        if num_passes < 2:
            return
        passes = np.arange(num_passes - 1)[:, None]
        is_wanted = passes < most - 1
        at = np.where(is_wanted, positions + passes, 0)
        self._positions[1:num_passes, :n] = at
        self._seq_lens[1:num_passes, :n] = at + 1
        max_seq_len = int(positions.max()) + num_passes
        for group, table in self._tables.items():
            blocks = self._block_tables.gather(group, rows, max_seq_len)
            table[:n, : blocks.shape[1]] = blocks
            slots = self._block_tables.slots(group, np.broadcast_to(rows, at.shape), at)
            self._slots[group][1:num_passes, :n] = np.where(is_wanted, slots, -1)

    def _capture(self, num_rows: int) -> bool:
        """Record a chain, and replay it on other hidden states; whether it gives what the model does, bit for bit."""
        self._load_unused_blocks(num_rows)
        graphs = [StepGraph(self._runtime, self._arena) for _ in range(self._num_drafts)]
        watch = OperationWatch()
        self._give(num_rows, 1.0)
        self._compute(num_rows, graphs, watch)
        if watch.names or self._arena.has_overflowed:
            logger.debug("chains of drafts are not captured: %s", ", ".join(sorted(watch.names)) or "no memory left")
            return False
        most, num_lines = np.full(num_rows, self._num_drafts), num_rows * self._model.num_places
        self._give(num_rows, 2.0)
        self._tokens.replay(graphs, most, 0.0)
        replayed = [array.copy() for array in (self._tokens.token_ids, self._tokens.logprobs)]
        self._give(num_rows, 2.0)  # a pass may overwrite what it is given
        self._compute(num_rows)
        found = self._tokens.token_ids, self._tokens.logprobs
        if not all(np.array_equal(a[:, :num_lines], b[:, :num_lines]) for a, b in zip(replayed, found, strict=True)):
            logger.warning("chains of drafts are not captured: a replay gave different bits")
            return False
        self._graphs[num_rows] = graphs
        return True

    def _give(self, num_rows: int, end: float) -> None:
        hidden = self._hidden[:num_rows]
        hidden.copy_(torch.linspace(-1.0, end, hidden.numel()).view_as(hidden))

    def _load_unused_blocks(self, num_rows: int) -> None:
        """Each row has a block of its own; no request runs."""
        for group, table in self._tables.items():
            block_size = self._block_tables.block_sizes[group]
            at = np.arange(self._num_drafts)[:, None] % block_size
            self._positions[:, :num_rows], self._seq_lens[:, :num_rows] = at, at + 1
            table[:num_rows] = np.arange(num_rows)[:, None]
            self._slots[group][:, :num_rows] = np.arange(num_rows) * block_size + at

    def _compute(
        self, num_rows: int, graphs: list[StepGraph] | None = None, watch: OperationWatch | None = None
    ) -> None:
        """All passes, call by call, on the inputs of the graphs; recorded in `graphs` if these are given."""
        hidden = self._hidden[:num_rows]
        for number in range(self._num_drafts):
            recording = nullcontext() if graphs is None else graphs[number].recording(goes_on=number > 0)
            with recording, watch or nullcontext():
                if number:
                    hidden = self._pass(number, num_rows, hidden)
                self._tokens.choose(number, self._model.compute_logits(hidden))
            self._tokens.pass_on(number)

    def _pass(self, number: int, num_rows: int, hidden: torch.Tensor) -> torch.Tensor:
        query_start_loc, seq_lens = self._query_start_loc[: num_rows + 1], self._seq_lens[number, :num_rows]
        metadata = {
            group: AttentionMetadata(
                num_reqs=num_rows,
                num_tokens=num_rows,
                query_start_loc=torch.from_numpy(query_start_loc),
                seq_lens=torch.from_numpy(seq_lens),
                block_table=torch.from_numpy(table[:num_rows]),
                slot_mapping=torch.from_numpy(self._slots[group][number, :num_rows]),
                query_start_loc_np=query_start_loc,
                seq_lens_np=seq_lens,
                max_query_len=1,
                max_seq_len=int(seq_lens.max()),
            )
            for group, table in self._tables.items()
        }
        input_ids = torch.from_numpy(self._tokens.input_ids[number, :num_rows])
        positions = torch.from_numpy(self._positions[number, :num_rows])
        return self._model.forward(input_ids, hidden, positions, self._attention.context_of(metadata))
