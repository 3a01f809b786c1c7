"""Drafts of a model on the worker's side: an executor that asks for them with steps, and the proposer that has them.

Made by the engine core's factory where such a model is configured. The worker drafts behind what a step samples, and
the scheduler asks its proposer when it plans the next one: `ModelProposer` keeps what came back between the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.core.computed_step import ComputedStep
from quire.core.draft_trees import first_path, with_trees
from quire.core.drafts import DraftRows, Proposals
from quire.core.engine_messages import EngineCoreRequest
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.model_drafts import DraftRequest, RowDrafts
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.core.worker_call import WorkerCall
from quire.executor.base import Executor
from quire.utils.replaced import replaced

_NO_DRAFTS = np.empty(0, dtype=np.int32)


class _Kept(NamedTuple):
    """Drafts behind the `num_tokens` tokens of a row, as in `RowDrafts`."""

    num_tokens: int
    token_ids: np.ndarray
    scores: np.ndarray
    parents: np.ndarray | None = None

    def first_path(self) -> _Kept:
        """The chain of a tree; each score is that of a draft behind the one before it."""
        assert self.parents is not None, "called for trees"
        path = first_path(self.parents)
        chances = np.cumprod(self.scores)[path]
        scores = chances / np.maximum(np.append(1.0, chances[:-1]), np.finfo(np.float32).tiny)
        return _Kept(self.num_tokens, self.token_ids[path], np.minimum(scores, 1.0).astype(np.float32))


_NOTHING = _Kept(-1, _NO_DRAFTS, _NO_DRAFTS)


class ModelProposer:
    """Implements `DraftProposer` with what the worker has drafted.

    The worker is asked with a step if the proposer was in its planning; where no row decoded, as in the newest step in
    which one did. So a controller that plans steps without drafts stops the model, too, for prompts as well.

    Args:
        name: the method.
        num_tokens: most drafts of a row.
        marks_rows: others draft, too, and messages to the worker say which rows have drafts of the model: these are
            judged by what they were drawn from.
        most_trees: with more rows than that, trees become chains of their likeliest path.
    """

    def __init__(self, name: str, num_tokens: int, *, marks_rows: bool = False, most_trees: int = 0) -> None:
        self.name = name
        self._num_tokens = num_tokens
        self._kept: dict[int, _Kept] = {}
        self._is_wanted = False
        self._was_wanted = True
        self._marks_rows = marks_rows
        self._given: list[int] = []
        self._most_trees = most_trees
        self._trees: dict[int, np.ndarray] = {}
        self._needs_chain = set[int]()

    def begin(self, request: EngineCoreRequest) -> None:
        """As `DraftProposer`: grammars go through drafts one behind the other."""
        params = request.sampling_params
        if params.structured_outputs is not None or params.thinking_token_budget is not None:
            self._needs_chain.add(request.handle)

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """As `DraftProposer`."""
        self._needs_chain.discard(handle)

    def want_drafts(self) -> None:
        """Have the worker draft behind the step that is planned."""
        self._is_wanted = True

    def propose(self, rows: DraftRows) -> Proposals:
        """As `DraftProposer`: what the worker drafted behind the tokens that these rows have."""
        self.want_drafts()
        drafts, scores = list[np.ndarray](), list[np.ndarray]()
        lengths, limits, handles = rows.num_tokens.tolist(), rows.max_tokens.tolist(), rows.handles.tolist()
        for row, length, most, handle in zip(rows.rows.tolist(), lengths, limits, handles, strict=True):
            kept = self._kept.get(row, _NOTHING)
            kept = kept if kept.num_tokens == length else _NOTHING
            if kept.parents is not None:
                if len(lengths) <= self._most_trees and handle not in self._needs_chain:
                    self._trees[row] = kept.parents
                else:
                    kept = kept.first_path()
            drafts.append(kept.token_ids[:most])
            self._given += [row] if len(kept.token_ids) else []
            scores.append(kept.scores[:most])
        counts = np.array([len(ids) for ids in drafts], dtype=np.int32)
        zeros = np.zeros(len(counts), dtype=np.int32)
        return Proposals(counts, _joined(drafts, np.int32), _joined(scores, np.float32), zeros, zeros)

    def mark(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        """The message of the step that was planned last, with what only the worker and this know of drafts."""
        given, trees, self._given, self._trees = self._given, self._trees, [], {}
        drafts = scheduled.drafts
        if drafts is None:
            return scheduled
        if self._marks_rows:
            drafts = dataclasses.replace(drafts, is_of_model=np.isin(scheduled.rows, given))
        if trees:
            drafts = with_trees(drafts, scheduled.rows, trees)
        return scheduled if drafts is scheduled.drafts else dataclasses.replace(scheduled, drafts=drafts)

    def request(self, scheduled: SchedulerOutput) -> DraftRequest | None:
        """What to ask with a step, which makes older drafts of its rows worthless; None = nothing."""
        if self._kept:
            for row in (*scheduled.freed_rows.tolist(), *scheduled.rows.tolist()):
                self._kept.pop(row, None)
        if not (self._is_wanted or self._was_wanted):
            return None  # as in most steps of a controller that plans them without drafts
        is_decoding = scheduled.is_sampling & ~scheduled.is_prefill
        if np.count_nonzero(is_decoding):
            self._was_wanted = self._is_wanted
        is_wanted, self._is_wanted = self._is_wanted or self._was_wanted, False
        rows = scheduled.rows[scheduled.is_sampling]
        if not is_wanted or not len(rows):
            return None
        return DraftRequest(rows, np.full(len(rows), self._num_tokens, dtype=np.int32))

    def take_in(self, drafts: RowDrafts) -> None:
        """Keep what the worker drafted until these rows are planned next."""
        ends = np.cumsum(drafts.counts)
        for row, length, start, end in zip(
            drafts.rows.tolist(), drafts.num_tokens.tolist(), (ends - drafts.counts).tolist(), ends.tolist(),
            strict=True,
        ):  # fmt: skip
            parents = None if drafts.parents is None else drafts.parents[start:end]
            self._kept[row] = _Kept(length, drafts.token_ids[start:end], drafts.scores[start:end], parents)


def _joined(parts: list[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    """All of them in one array."""
    joined = parts[0] if len(parts) == 1 else np.concatenate([*parts, _NO_DRAFTS])
    return joined.astype(dtype, copy=False)


class DraftingExecutor(Executor):
    """Another executor, asked for drafts with the steps that `proposer` wants them for."""

    def __init__(self, executor: Executor, proposer: ModelProposer) -> None:
        self._executor = executor
        self._proposer = proposer

    def want_drafts(self) -> None:
        """As `ModelProposer`."""
        self._proposer.want_drafts()

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """As `Executor`."""
        return self._executor.kv_cache_specs()

    def available_kv_cache_bytes(self) -> int:
        """As `Executor`."""
        return self._executor.available_kv_cache_bytes()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """As `Executor`."""
        self._executor.initialize_kv_cache(kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ComputedStep:
        """As `Executor`, with a request for drafts."""
        scheduler_output = self._proposer.mark(scheduler_output)
        request = self._proposer.request(scheduler_output)
        if request is not None:
            scheduler_output = replaced(scheduler_output, draft_request=request)
        return self._executor.execute_model(scheduler_output)

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """As `Executor`; drafts that come with the output are kept."""
        output = self._executor.sample_tokens(computed, grammar)
        if output.proposals is not None:
            self._proposer.take_in(output.proposals)
            output = replaced(output, proposals=None)  # taken: they are no part of a recording
        return output

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `Executor`."""
        return self._executor.call_worker(method, *args, **kwargs)

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """As `Executor`."""
        return self._executor.collective_rpc(call)

    @property
    def rank_pids(self) -> Sequence[int | None]:
        """As `Executor`."""
        return self._executor.rank_pids

    def watch_silence(self, show: Callable[[float], None]) -> None:
        """As `Executor`."""
        self._executor.watch_silence(show)

    def shutdown(self) -> None:
        """As `Executor`."""
        self._executor.shutdown()
