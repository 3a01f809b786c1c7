from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.computed_step import ComputedStep
from quire.core.sampling_params import SamplingParams
from tests.unit.worker.driver import Driver, Job, make_runner
from tests.unit.worker.toy_model import VOCAB_SIZE, ToyBackend, ToyModel, next_token


def make_driver(seed: int = 0, mode: str = "raw_logprobs", model: ToyModel | None = None) -> Driver:
    runner = make_runner(model or ToyModel(), ToyBackend(), vocab_size=VOCAB_SIZE, mode=mode)
    return Driver(runner, seed=seed)


def greedy_continuation(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40), st.integers(1, 12)),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([1, 3, 4, 7, 1000]),
    st.sampled_from([0, 1, 2, 5]),
    st.integers(0, 1000),
)
def test_every_token_sees_its_whole_context_however_it_was_scheduled(
    requests: list[tuple[list[int], int]], max_chunk: int, preempt_every: int, seed: int
) -> None:
    jobs = [Job(prompt, SamplingParams(temperature=0, max_tokens=n)) for prompt, n in requests]
    if max_chunk < 40 and preempt_every:
        preempt_every = 50  # preemption in every step would never let a long prompt finish
    make_driver(seed).run(jobs, max_chunk=max_chunk, preempt_every=preempt_every, shuffle=True)
    for job, (prompt, num_tokens) in zip(jobs, requests, strict=True):
        assert job.output == greedy_continuation(prompt, num_tokens)


def seeded_job(number: int, **overrides: object) -> Job:
    values = {"temperature": 1.5, "max_tokens": 20, "logprobs": 3, "presence_penalty": 0.3, "top_p": 0.97, **overrides}
    prompt = [(number * 13 + i * i) % VOCAB_SIZE for i in range(5 + number % 30)]
    return Job(prompt, SamplingParams(**values), seed=number * 10**15 - 5)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_seeded_request_gets_the_same_tokens_and_logprobs_in_every_company(mode: str) -> None:
    alone = seeded_job(25)
    make_driver(1, mode).run([alone])
    assert len(set(alone.output)) > 5, "a random continuation"
    for max_chunk, preempt_every in ((10_000, 0), (7, 0), (10_000, 3), (7, 9)):
        jobs = [seeded_job(number) for number in range(64)]
        make_driver(2, mode).run(jobs, max_chunk=max_chunk, preempt_every=preempt_every, shuffle=True)
        assert jobs[25].output == alone.output
        assert jobs[25].logprobs == alone.logprobs
        assert sum(job.num_preemptions for job in jobs) >= (10 if preempt_every else 0)


def test_different_seeds_give_different_tokens() -> None:
    jobs = [Job([1, 2, 3], SamplingParams(temperature=1.5, max_tokens=12), seed=seed) for seed in range(8)]
    make_driver().run(jobs)
    assert len({tuple(job.output) for job in jobs}) == 8


@pytest.mark.parametrize("max_chunk", [10_000, 7, 1])
@pytest.mark.parametrize("num_top", [0, 4])
def test_prompt_logprobs_cover_every_prompt_token_but_the_first_over_any_chunks(max_chunk: int, num_top: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=num_top)
    job = Job([5, 90, 3, 3, 17, 60, 1, 2, 44, 8, 9, 10, 11, 12, 13], params)
    other = Job(list(range(20)), SamplingParams(temperature=0, max_tokens=5))
    make_driver().run([other, job], max_chunk=max_chunk)
    assert sorted(job.prompt_logprobs) == list(range(1, len(job.prompt)))
    assert other.prompt_logprobs == {}
    for position, (ids, values, ranks) in job.prompt_logprobs.items():
        best = next_token(job.prompt[:position])
        logits = -0.5 * ((np.arange(VOCAB_SIZE) - best) % VOCAB_SIZE)
        logprobs = logits - np.log(np.exp(logits).sum())
        assert ids == [job.prompt[position], *[(best + i) % VOCAB_SIZE for i in range(num_top)]]
        assert ranks == [1 + (job.prompt[position] - best) % VOCAB_SIZE, *range(1, num_top + 1)]
        assert np.abs(np.array(values) - logprobs[ids]).max() <= 1e-4


def test_a_request_that_comes_back_with_output_repeats_no_prompt_logprobs() -> None:
    job = Job([5, 6, 7, 8], SamplingParams(temperature=0, max_tokens=9, prompt_logprobs=1))
    driver = make_driver()
    driver.step([job], 100)
    assert sorted(job.prompt_logprobs) == [1, 2, 3]
    job.prompt_logprobs.clear()
    driver.release(job)
    driver.step([job], 100)
    assert job.prompt_logprobs == {} and len(job.output) == 2


def test_a_step_that_ends_inside_every_prompt_samples_nothing() -> None:
    job = Job(list(range(10)), SamplingParams(temperature=0, max_tokens=2, logprobs=1))
    output = make_driver().step([job], 4)
    assert output.rows.shape == (0,) and output.sampled_token_ids.shape == (0,) and output.logprobs is None


def test_outputs_are_in_the_order_of_the_batch_and_int32() -> None:
    jobs = [Job([n], SamplingParams(temperature=0, max_tokens=2)) for n in range(5)]
    output = make_driver().step(jobs, 10)
    assert output.rows.tolist() == [job.row for job in jobs]
    assert output.rows.dtype == np.int32 and output.sampled_token_ids.dtype == np.int32


class PoisonedModel(ToyModel):
    """Gives NaN to requests whose newest token is 13."""

    def forward(self, input_ids, positions, context):  # type: ignore[no-untyped-def]
        hidden = super().forward(input_ids, positions, context)
        hidden[input_ids == 13] = float("nan")
        return hidden


def test_a_request_whose_logits_are_nan_is_reported_and_others_are_not_touched() -> None:
    jobs = [
        Job([1, 2, 13], SamplingParams(temperature=0, max_tokens=1)),
        Job([1, 2, 14], SamplingParams(temperature=0, max_tokens=1)),
    ]
    make_driver(model=PoisonedModel()).run(jobs)
    assert len(jobs[0].errors) == 1 and "position 3" in jobs[0].errors[0] and "NaN" in jobs[0].errors[0]
    assert 0 <= jobs[0].output[0] < VOCAB_SIZE
    assert jobs[1].errors == [] and jobs[1].output == greedy_continuation([1, 2, 14], 1)


def test_logits_are_computed_only_for_rows_that_need_them() -> None:
    class Counting(ToyModel):
        num_rows = 0

        def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
            Counting.num_rows += len(hidden_rows)
            return super().compute_logits(hidden_rows)

    jobs = [Job(list(range(20)), SamplingParams(temperature=0, max_tokens=3)) for _ in range(4)]
    make_driver(model=Counting()).run(jobs, max_chunk=9)
    assert Counting.num_rows == 12


def test_only_a_step_that_was_computed_can_be_sampled() -> None:
    driver = make_driver()
    with pytest.raises(AssertionError, match="by the runner that computed it"):
        driver.runner.sample_tokens(ComputedStep())
