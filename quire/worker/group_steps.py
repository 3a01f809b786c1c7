"""How a rank of a group computes a step, rank 0 and the others alike: from the same message, by the same calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.core.scheduler_output import StateBlocks
from quire.distributed.pipeline import PipelineStage
from quire.models.aux_states import AuxStates
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import StepGraphs, StepModel
from quire.worker.draft_trees import TreeBlocks
from quire.worker.group_messages import ForwardStep, TreeSegments
from quire.worker.input_batch import InputBatch

NO_IDS = np.empty(0, dtype=np.int32)

PlacedTables = tuple[np.ndarray, np.ndarray]
"""[num_reqs, num_blocks] int32 and [num_tokens] int64: blocks and slots of a KV cache group."""


class StepTables(BlockTables):
    """Block tables as a message has them: gathered for one step, and nothing beyond it."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._gathered: list[np.ndarray] = []
        self._slots: list[np.ndarray] = []

    def take(self, step: ForwardStep) -> None:
        """From now on those of this step."""
        self._gathered, self._slots = list(map(_writable, step.tables)), list(map(_writable, step.slots))

    def gather(self, group: int, rows: np.ndarray, max_seq_len: int) -> np.ndarray:
        """Those of the step."""
        return self._gathered[group]

    def slots(self, group: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Those of the step."""
        return self._slots[group]


class GroupStep:
    """Computes steps; owns nothing.

    Args:
        tables: of the steps; the graphs were made with them.
        stage: the layers that are here; None = all.
        aux: where the model leaves states before some of these layers, which rank 0 gets; None = nowhere.
    """

    def __init__(
        self,
        model: StepModel,
        graphs: StepGraphs,
        attention: AttentionGroups,
        tables: StepTables,
        device: torch.device,
        stage: PipelineStage | None = None,
        aux: AuxStates | None = None,
    ) -> None:
        self._model = model
        self._graphs = graphs
        self._attention = attention
        self._tables = tables
        self._device = device
        self._stage = stage
        self._aux = aux

    def message(
        self,
        batch: InputBatch,
        block_tables: BlockTables,
        *,
        wants_all: bool,
        placed: Mapping[int, PlacedTables] | None = None,
        segments: TreeSegments | None = None,
    ) -> ForwardStep:
        """What a rank needs to compute the step of `batch`.

        Args:
            placed: by group, where its tokens are not at their positions in the rows' own blocks.
            segments: where something is copied before attention; those of `batch.trees` are made here.
        """
        if batch.trees is not None:
            placed, segments = self._place_trees(batch, block_tables)
        max_seq_len = int(batch.seq_lens.max())
        tables, slots = [], []
        for group, has_state in enumerate(block_tables.has_state):
            if placed is not None and group in placed:
                tables.append(placed[group][0])
                slots.append(placed[group][1])
                continue
            # Other stages may have layers of groups that this one has none of.
            is_needed = not has_state and (self._stage is not None or group in self._attention.groups)
            tables.append(block_tables.gather(group, batch.rows, max_seq_len) if is_needed else NO_IDS)
            slots.append(block_tables.slots(group, batch.token_rows, batch.token_positions) if is_needed else NO_IDS)
        return ForwardStep(
            rows=batch.rows,
            num_computed_tokens=batch.num_computed_tokens,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            input_ids=batch.input_ids.numpy(),
            token_rows=batch.token_rows,
            token_positions=batch.token_positions,
            logits_indices=batch.logits_indices,
            tables=tables,
            slots=slots,
            read_blocks=[one.read_block_ids for one in batch.states],
            write_blocks=[one.write_block_ids for one in batch.states],
            token_state_blocks=list(batch.token_state_blocks),
            wants_all=wants_all,
            segments=segments,
        )

    def _place_trees(
        self, batch: InputBatch, block_tables: BlockTables
    ) -> tuple[dict[int, PlacedTables], TreeSegments]:
        assert batch.trees is not None, "called for trees"
        (group,) = self._attention.groups
        blocks = self._attention.place_trees(batch, block_tables)
        assert blocks.copied_slots is not None, "a tree has a second path"
        segments = TreeSegments(batch.trees.start_loc, batch.trees.seq_lens, blocks.copied_slots)
        return {group: (blocks.table, blocks.slots)}, segments

    def batch_of(self, step: ForwardStep) -> InputBatch:
        """The batch of a message."""
        return InputBatch(
            rows=step.rows,
            num_computed_tokens=_writable(step.num_computed_tokens),
            query_start_loc=_writable(step.query_start_loc),
            seq_lens=_writable(step.seq_lens),
            input_ids=torch.from_numpy(_writable(step.input_ids)),
            positions=torch.from_numpy(_writable(step.token_positions)),
            token_rows=step.token_rows,
            token_positions=step.token_positions,
            sampling_rows=NO_IDS,
            sampling_positions=NO_IDS,
            logits_indices=_writable(step.logits_indices),
            states=tuple(
                StateBlocks(_writable(read), _writable(write))
                for read, write in zip(step.read_blocks, step.write_blocks, strict=True)
            ),
            token_state_blocks=tuple(map(_writable, step.token_state_blocks)),
        )

    def run(self, step: ForwardStep, batch: InputBatch) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size], as `ModelRunner` computes them on one rank. The last of several
        stages sends those that are asked for to rank 0, and each its states before layers of which heads draft.
        """
        hidden = self._forward(step, batch)
        if self._stage is not None and self._stage.is_lead and not self._stage.is_first:
            self._return(self._stage, step, batch, hidden)
        return hidden

    def _return(self, stage: PipelineStage, step: ForwardStep, batch: InputBatch, hidden: torch.Tensor) -> None:
        """To rank 0, which receives in this order (`late_rows`)."""
        if self._aux is not None and step.wants_all:
            for states in self._aux.tensors:
                stage.communicator.send(states, 0)
        if stage.is_last and (num_rows := num_returned(step, batch)):
            rows = hidden if num_rows == batch.num_tokens else hidden[torch.from_numpy(batch.logits_indices)]
            stage.communicator.send(rows, 0)

    def own_aux(self) -> list[torch.Tensor] | None:
        """States that the newest step has left here, as long as they are needed; None = steps leave none."""
        return None if self._aux is None else [states.clone() for states in self._aux.tensors]

    def put_aux(self, tensors: list[torch.Tensor]) -> None:
        """Those of all stages, of a step that is sampled now, for the model that drafts behind it."""
        assert self._aux is not None, "the step has left some"
        self._aux.tensors = tensors

    def _forward(self, step: ForwardStep, batch: InputBatch) -> torch.Tensor:
        self._tables.take(step)
        wanted = None if step.wants_all else batch.logits_indices
        hidden = self._graphs.forward(batch, wanted) if step.segments is None else None
        if hidden is not None:
            return hidden
        context = self._context(step, batch)
        if wanted is not None:
            context = dataclasses.replace(context, wanted=torch.from_numpy(wanted).to(self._device))
        return self._model.forward(batch.input_ids, batch.positions, context)

    def _context(self, step: ForwardStep, batch: InputBatch) -> ForwardContext:
        found = step.segments
        if found is None:
            return self._attention.forward_context(batch, self._tables)
        (group,) = self._attention.groups
        blocks = TreeBlocks(
            self._tables.gather(group, step.rows, 0),
            self._tables.slots(group, step.token_rows, step.token_positions),
            _writable(found.copied_slots),
        )
        return self._attention.placed_context(
            batch.num_tokens, _writable(found.start_loc), _writable(found.seq_lens), blocks, self._device
        )


def num_returned(step: ForwardStep, batch: InputBatch) -> int:
    """Hidden states that the last of several stages sends to rank 0."""
    return batch.num_tokens if step.wants_all else len(batch.logits_indices)


def _writable(array: np.ndarray) -> np.ndarray:
    """For torch and the kernels, which take nothing else: a copy of what lies anywhere in a message."""
    return array if array.flags.writeable and array.flags.aligned else np.array(array)
