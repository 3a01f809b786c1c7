"""A tree of drafts is verified in one step, on every tier, and changes no bit of tokens or log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.core.draft_trees import depth_first, reordered
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import DraftTokens, NewBlocks, NewRequestData, SchedulerOutput
from quire.executor.uniproc import UniProcExecutor
from quire.kernels.native.library import EMULATED_TIER, supported_tiers
from quire.worker import worker
from tests.unit.worker.driver import Job
from tests.unit.worker.tiny import VOCAB_SIZE, cache_config, cpu_platform, tiny_arch, tiny_config

MAX_MODEL_LEN = 384
BLOCK_SIZE = 16
NUM_ROWS = 6
NUM_SCRATCH = 200
NO_IDS = np.empty(0, dtype=np.int32)
Tree = tuple[list[int], list[int]]
"""Token ids and parents."""


@pytest.fixture(autouse=True)
def scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "num_scratch_blocks", lambda *args: NUM_SCRATCH)


def run(jobs: list[Job], guess: Callable[[Job], Tree | None], **settings: Any) -> int:
    """Run jobs to their ends, with what `guess` drafts; returns the number of steps."""
    config = tiny_config(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, max_num_seqs=NUM_ROWS, **settings)
    executor = UniProcExecutor(config, cpu_platform())
    executor.initialize_kv_cache(cache_config(executor, 1 + NUM_ROWS * MAX_MODEL_LEN // BLOCK_SIZE + NUM_SCRATCH))
    blocks = np.random.default_rng(0).permutation(NUM_ROWS * MAX_MODEL_LEN // BLOCK_SIZE).reshape(NUM_ROWS, -1) + 1
    num_steps = 0
    while live := [job for job in jobs if not job.is_done]:
        new = [job for job in live if job.row < 0]
        for job in new:
            job.row = jobs.index(job)
        guesses = [None if job in new else guess(job) for job in live]
        output = executor.sample_tokens(executor.execute_model(step(live, new, guesses, blocks, num_steps)))
        take_in(live, output)
        num_steps += 1
    executor.shutdown()
    return num_steps


def step(
    live: list[Job], new: list[Job], guesses: list[Tree | None], blocks: np.ndarray, number: int
) -> SchedulerOutput:
    """A message in which every job computes all it has left, and its drafts."""
    rows, lengths = (
        np.array(x, dtype=np.int32) for x in ([job.row for job in live], [len(job.tokens) for job in live])
    )
    computed = np.array([job.num_computed for job in live], dtype=np.int32)
    counts = np.array([0 if one is None else len(one[0]) for one in guesses], dtype=np.int32)
    drafts = None
    if counts.any():
        ids, parents = (np.array([x for one in guesses if one for x in one[i]], dtype=np.int32) for i in (0, 1))
        drafts = DraftTokens(counts, ids, parents=parents)
    return SchedulerOutput(
        step=number,
        freed_rows=NO_IDS,
        new_reqs=tuple(
            NewRequestData(
                row=job.row, request_id="", token_ids=np.array(job.prompt, dtype=np.int32), eos_token_id=-1,
                num_prompt_tokens=len(job.prompt), sampling_params=job.params, seed=job.seed,
                block_ids=(blocks[job.row].astype(np.int32),),
            ) for job in new
        ),
        new_blocks=(NewBlocks(NO_IDS, NO_IDS, NO_IDS),),
        rows=rows,
        num_scheduled_tokens=lengths - computed + counts,
        num_computed_tokens=computed,
        is_prefill=lengths - computed > 1,
        is_sampling=np.ones(len(live), dtype=np.bool_),
        total_num_scheduled_tokens=int((lengths - computed + counts).sum()),
        drafts=drafts,
    )  # fmt: skip


def take_in(live: list[Job], output: Any) -> None:
    starts = output.sampled_start_loc
    starts = np.arange(len(live) + 1) if starts is None else starts
    for i, job in enumerate(live):
        job.output += output.sampled_token_ids[starts[i] : starts[i + 1]].tolist()
        job.num_computed = len(job.tokens) - 1
        lines = output.logprobs
        for line in np.flatnonzero((lines.index >= starts[i]) & (lines.index < starts[i + 1])):
            job.logprobs.append((lines.token_ids[line, :3].tolist(), lines.logprobs[line, :3].tobytes(), []))


class Guesser:
    """Trees in which the right continuation is somewhere, at a random depth; now and then a chain, or nothing."""

    def __init__(self, answers: dict[int, list[int]], kinds: str = "tree chain none") -> None:
        self._answers = answers
        self._random = np.random.default_rng(8)
        self._kinds = kinds.split()

    def __call__(self, job: Job) -> Tree | None:
        kind = self._random.choice(self._kinds)
        right = self._answers[job.row][len(job.output) :][: self._random.integers(0, 7)]
        if kind == "none" or not right:
            return None
        if kind == "chain":
            return [*right, 5], list(range(-1, len(right)))
        return self._tree(right)

    def _tree(self, right: list[int]) -> Tree:
        """The path `right` among wrong drafts, some of which stand before its own."""
        ids, parents, last = [], [], -1
        for token in right:
            others = [(int(x), last) for x in self._random.integers(0, VOCAB_SIZE, self._random.integers(0, 3))]
            others = [(other, parent) for other, parent in others if other != token]
            at = int(self._random.integers(0, len(others) + 1))
            for i, (one, parent) in enumerate([*others[:at], (token, last), *others[at:]]):
                ids.append(one)
                parents.append(parent)
                if i == at:
                    last = len(ids) - 1
                elif self._random.random() < 0.5:  # a wrong one has children, too
                    ids.append(int(self._random.integers(0, VOCAB_SIZE)))
                    parents.append(len(ids) - 2)
        order = depth_first(np.array(parents))
        return np.array(ids)[order].tolist(), reordered(np.array(parents, dtype=np.int32), order).tolist()


def make_jobs() -> list[Job]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9}, {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5},
        {"temperature": 0, "repetition_penalty": 1.3}, {"temperature": 1.0, "min_p": 0.02}, {"temperature": 0.6},
    ]  # fmt: skip
    prompts = [np.random.default_rng(i).integers(0, VOCAB_SIZE, 3 + 13 * i).tolist() for i in range(NUM_ROWS)]
    return [
        Job(prompt, SamplingParams(max_tokens=40, logprobs=2, **kind), seed=i)
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]


def check(kinds: str = "tree chain none", **settings: Any) -> None:
    plain, jobs = make_jobs(), make_jobs()
    num_steps = run(plain, lambda job: None, **settings)
    guesser = Guesser({job.row: job.output for job in plain}, kinds)
    num_with_trees = run(jobs, guesser, **settings)
    for one, other in zip(jobs, plain, strict=True):
        assert one.output[:40] == other.output
        assert one.logprobs[:40] == other.logprobs
    assert num_with_trees < 0.7 * num_steps


NATIVE: dict[str, Any] = {"attention_backend": "native_cpu", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}


@pytest.fixture(params=[*supported_tiers(), EMULATED_TIER])
def tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KERNEL_TIER", request.param)


@pytest.mark.usefixtures("tier")
def test_a_tree_changes_no_bit_on_the_native_kernels() -> None:
    check(**NATIVE)


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize("length", [3, 40, 46, 81])
def test_every_token_of_a_tree_has_the_bits_of_its_path_computed_alone(length: int) -> None:
    ids, parents = [9, 4, 7, 1, 8, 2, 6], [-1, 0, 1, 0, -1, 4, 4]
    prompt = np.random.default_rng(length).integers(0, VOCAB_SIZE, length).tolist()
    config = tiny_config(max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, max_num_seqs=NUM_ROWS, **NATIVE)
    executor = UniProcExecutor(config, cpu_platform())
    executor.initialize_kv_cache(cache_config(executor, 20 + NUM_SCRATCH))
    job = Job(prompt, SamplingParams(max_tokens=9, temperature=0, logprobs=0))
    job.row, blocks = 0, np.random.default_rng(0).permutation(16).reshape(1, -1) + 1
    steps = iter(range(99))

    def hidden_of(tree: Tree | None, is_new: bool = False) -> torch.Tensor:
        message = step([job], [job] if is_new else [], [tree], blocks, next(steps))
        return executor.execute_model(message).hidden.clone()

    hidden_of(None, is_new=True)
    job.output, job.num_computed = [5], length
    found = hidden_of((ids, parents))
    for leaf in (2, 3, 5, 6):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        alone = hidden_of(([ids[i] for i in path], list(range(-1, len(path) - 1))))
        assert torch.equal(alone[1:], found[[i + 1 for i in path]]) and torch.equal(alone[0], found[0])
    executor.shutdown()


@pytest.mark.parametrize("cache", ["float32", "fp8_e4m3"])
def test_nor_with_caches_of_other_elements(cache: str) -> None:
    dtype = "float32" if cache == "float32" else "bfloat16"
    check("tree", attention_backend="native_cpu", dtype=dtype, kv_cache_dtype=cache)


def test_nor_with_windows() -> None:
    arch = tiny_arch(
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=24, max_position_embeddings=512
    )
    check("tree", arch=arch, **NATIVE)


def test_the_reference_backend_verifies_trees_too() -> None:
    plain, jobs = make_jobs(), make_jobs()
    num_steps = run(plain, lambda job: None)
    assert run(jobs, Guesser({job.row: job.output for job in plain}, "tree")) < 0.7 * num_steps
    for one, other in zip(jobs, plain, strict=True):
        assert one.output[:40] == other.output
