"""A scheduler's place-holder for tests: places requests on rows and blocks at random, cuts prompts, preempts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from quire.attention.backend import AttentionBackend
from quire.core.kv_spec import KVCacheConfig, KVCacheGroupSpec
from quire.core.logprobs import LogprobsArrays
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import NewBlocks, NewRequestData, SchedulerOutput
from quire.models.interfaces import CausalLM
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.sample.states import SamplingStates
from quire.utils.memory import GIB
from quire.worker.attention_groups import AttentionGroups
from quire.worker.block_tables import BlockTables
from quire.worker.device.graphs import NoGraphs
from quire.worker.device.memory import HostMemory
from quire.worker.model_runner import ModelRunner
from quire.worker.request_states import RequestStates


def make_runner(
    model: CausalLM,
    backend: AttentionBackend,
    *,
    vocab_size: int,
    max_num_seqs: int = 64,
    max_model_len: int = 128,
    num_blocks: int = 1200,
    block_size: int = 4,
    mode: str = "raw_logprobs",
    config: KVCacheConfig | None = None,
) -> ModelRunner:
    specs = model.kv_cache_specs(block_size)
    if config is None:
        kinds = dict.fromkeys(specs.values())
        groups = [KVCacheGroupSpec(layer_names=tuple(n for n in specs if specs[n] == one), spec=one) for one in kinds]
        config = KVCacheConfig(num_blocks=num_blocks, groups=tuple(groups))
    device = torch.device("cpu")
    caches, pools, transfers = HostMemory(GIB).allocate_kv_caches(config, list(specs), backend, torch.float32)
    return ModelRunner(
        model,
        RequestStates(max_num_seqs, max_model_len, vocab_size),
        BlockTables(config, max_num_seqs, max_model_len),
        SamplingStates(max_num_seqs, vocab_size, device),
        AttentionGroups(config, list(specs), caches, pools),
        device,
        TorchSamplingOps(),
        NoGraphs(),
        mode,
        transfers,
    )


@dataclass
class Job:
    """One request as the driver sees it; row -1 = not placed."""

    prompt: list[int]
    params: SamplingParams
    seed: int = 0
    row: int = -1
    num_computed: int = 0
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logprobs: list[tuple[list[int], bytes, list[int]]] = field(default_factory=list)
    prompt_logprobs: dict[int, tuple[list[int], list[float], list[int]]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def is_done(self) -> bool:
        return len(self.output) >= (self.params.max_tokens or 1)


class Driver:
    """Runs jobs to their ends; every choice comes from a seeded generator."""

    def __init__(
        self, runner: ModelRunner, *, num_rows: int = 64, num_blocks: int = 1200, block_size: int = 4, seed: int = 0
    ) -> None:
        self.runner = runner
        self.random = np.random.default_rng(seed)
        self.free_rows = self.random.permutation(num_rows).tolist()
        self.free_blocks = (1 + self.random.permutation(num_blocks - 1)).tolist()
        self.block_size = block_size
        self.freed: list[int] = []
        self.step_number = 0

    def run(self, jobs: list[Job], *, max_chunk: int = 10_000, preempt_every: int = 0, shuffle: bool = False) -> None:
        while not all(job.is_done for job in jobs):
            live = [job for job in jobs if not job.is_done]
            if shuffle:
                self.random.shuffle(live)  # type: ignore[arg-type]
            self.step(live, max_chunk)
            for job in jobs:
                if job.row >= 0 and job.is_done:
                    self.release(job)
            if preempt_every and self.step_number % preempt_every == 0:
                for job in jobs:
                    if job.row >= 0 and self.random.random() < 0.4:
                        self.release(job)
                        job.num_preemptions += 1

    def release(self, job: Job) -> None:
        """Take the job's row and blocks away; it starts again from what it has."""
        self.freed.append(job.row)
        self.free_rows.append(job.row)
        self.free_blocks.extend(job.blocks)
        job.row, job.num_computed, job.blocks = -1, 0, []

    def step(self, jobs: list[Job], max_chunk: int) -> ModelRunnerOutput:
        freed = np.array(self.freed, dtype=np.int32)
        self.freed = []
        new_reqs, appended, counts = [], [], []
        for job in jobs:
            count = min(max_chunk, len(job.tokens) - job.num_computed)
            counts.append(count)
            is_new = job.row < 0
            if is_new:
                job.row = self.free_rows.pop()
            while len(job.blocks) * self.block_size < job.num_computed + count:
                job.blocks.append(self.free_blocks.pop())
                if not is_new:
                    appended.append((job.row, len(job.blocks) - 1, job.blocks[-1]))
            if is_new:
                new_reqs.append(self._new_request(job))
        columns = np.array(appended, dtype=np.int32).reshape(-1, 3).T
        num_scheduled = np.array(counts, dtype=np.int32)
        num_computed = np.array([job.num_computed for job in jobs], dtype=np.int32)
        lengths = np.array([len(job.tokens) for job in jobs], dtype=np.int32)
        scheduled = SchedulerOutput(
            step=self.step_number,
            freed_rows=freed,
            new_reqs=tuple(new_reqs),
            new_blocks=(NewBlocks(*columns),),
            rows=np.array([job.row for job in jobs], dtype=np.int32),
            num_scheduled_tokens=num_scheduled,
            num_computed_tokens=num_computed,
            is_prefill=lengths - num_computed > 1,
            is_sampling=num_computed + num_scheduled == lengths,
            total_num_scheduled_tokens=int(num_scheduled.sum()),
        )
        self.step_number += 1
        output = self.runner.sample_tokens(self.runner.execute_model(scheduled))
        self._take_in(jobs, counts, output)
        return output

    def _new_request(self, job: Job) -> NewRequestData:
        return NewRequestData(
            row=job.row,
            request_id=f"job-{job.seed}",
            token_ids=np.array(job.tokens, dtype=np.int32),
            num_prompt_tokens=len(job.prompt),
            sampling_params=job.params,
            seed=job.seed,
            eos_token_id=-1,
            block_ids=(np.array(job.blocks, dtype=np.int32),),
        )

    def _take_in(self, jobs: list[Job], counts: list[int], output: ModelRunnerOutput) -> None:
        by_row = {job.row: job for job in jobs}
        for job, count in zip(jobs, counts, strict=True):
            job.num_computed += count
        for row, token_id in zip(output.rows.tolist(), output.sampled_token_ids.tolist(), strict=True):
            by_row[row].output.append(token_id)
        for row, lines in output.prompt_logprobs.items():
            by_row[row].prompt_logprobs.update(
                {int(at): (ids, values, ranks) for at, ids, values, ranks in prompt_lines(lines)}
            )
        for row, error in output.errors.items():
            by_row[row].errors.append(error)
        if output.logprobs is not None:
            for line, entry in enumerate(output.logprobs.index.tolist()):
                job = by_row[int(output.rows[entry])]
                width = 1 + (job.params.logprobs or 0)
                job.logprobs.append(
                    (
                        output.logprobs.token_ids[line, :width].tolist(),
                        output.logprobs.logprobs[line, :width].tobytes(),
                        output.logprobs.ranks[line, :width].tolist(),
                    )
                )


def prompt_lines(lines: LogprobsArrays) -> zip[tuple[int, list[int], list[float], list[int]]]:
    return zip(
        lines.index.tolist(), lines.token_ids.tolist(), lines.logprobs.tolist(), lines.ranks.tolist(), strict=True
    )
