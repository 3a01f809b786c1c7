from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, EngineGenerateError, ValidationError
from quire.sample.logits_processor import LogitsProcessor, RowRequest, load_processors, validate_params
from quire.sample.ops.interface import SamplingOps
from quire.sample.states import SamplingStates
from tests.unit.sample import reference
from tests.unit.sample.conftest import VOCAB_SIZE, Bench


def apply(bench: Bench, rows: list[int], logits: torch.Tensor) -> np.ndarray:
    return bench.states.apply_argmax_changing(logits.clone(), np.array(rows, dtype=np.int32)).numpy()


TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)
PENALTY = st.sampled_from([-1.5, -0.3, 0.0, 0.2, 1.7])
CONSTRAINTS = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3]),
        "frequency_penalty": PENALTY,
        "presence_penalty": PENALTY,
        "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-9, 9), max_size=5),
        "allowed_token_ids": st.none() | st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30),
        "bad_words_token_ids": st.none()
        | st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=6),
        "min_tokens": st.integers(0, 8),
        "max_tokens": st.just(50),
        "stop_token_ids": st.none() | st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
    }
)


@settings(deadline=None, max_examples=80)
@given(
    requests=st.lists(st.tuples(CONSTRAINTS, TOKENS, st.lists(st.integers(0, 3), max_size=9)), min_size=1, max_size=5),
    data=st.data(),
)
def test_rows_match_the_reference_as_tokens_come_in_and_rows_go_and_come_back(
    ops: SamplingOps, requests: list[tuple[dict[str, object], list[int], list[int]]], data: st.DataObject
) -> None:
    states = SamplingStates(8, VOCAB_SIZE, torch.device("cpu"), apply_penalties=ops.apply_penalties_inplace)
    bench = Bench(states, None)  # type: ignore[arg-type]
    live: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for row, (values, prompt, output) in enumerate(requests):
        params = SamplingParams(**values)
        bench.add(row + 2, params, prompt, list(output), eos=7)
        live[row + 2] = params, prompt, list(output)
    for step in range(4):
        rows = data.draw(st.lists(st.sampled_from(sorted(live)), min_size=1, unique=True))
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(step)) * 4
        found = apply(bench, rows, logits)
        for line, row in enumerate(rows):
            expected = reference.constrained_logits(logits[line].numpy(), *live[row], eos_token_id=7)
            assert (np.isneginf(found[line]) == np.isneginf(expected)).all()
            possible = np.isfinite(expected)
            assert (np.abs(found[line][possible] - expected[possible]) <= 1e-4).all()
        token_ids = data.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
        bench.append(rows, token_ids)
        for row, token_id in zip(rows, token_ids, strict=True):
            live[row][2].append(token_id)
        if data.draw(st.booleans()):  # preemption: the row is freed and the request comes back with its output
            row = data.draw(st.sampled_from(sorted(live)))
            bench.states.remove_row(row)
            bench.add(row, *live[row], eos=7)


def test_rows_without_needs_carry_no_flag_and_removed_rows_leave_nothing_behind(bench: Bench) -> None:
    bench.add(0, SamplingParams(temperature=0))
    bench.add(1, SamplingParams(temperature=0, min_tokens=3, presence_penalty=1.0), eos=4)
    assert bench.states.flags[0] == 0 and bench.states.flags[1] != 0
    bench.states.remove_row(1)
    bench.states.remove_row(1)
    assert bench.states.flags[1] == 0
    bench.add(1, SamplingParams(temperature=0))
    logits = torch.randn(1, VOCAB_SIZE)
    assert (apply(bench, [1], logits) == logits.numpy()).all()


def test_min_tokens_lets_go_after_enough_tokens(bench: Bench) -> None:
    bench.add(0, SamplingParams(temperature=0, min_tokens=2, max_tokens=5, stop_token_ids=[5]), eos=4)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 4], logits[0, 5], logits[0, 6] = 9.0, 8.0, 7.0
    chosen = []
    for _ in range(3):
        chosen.append(int(bench.sample(logits, [0]).token_ids[0]))
        bench.append([0], chosen[-1:])
    assert chosen == [6, 6, 4]


def test_penalties_count_thousands_of_tokens(bench: Bench) -> None:
    params = SamplingParams(frequency_penalty=0.01)
    bench.add(0, params, [1])
    output: list[int] = []
    for step in range(3000):
        bench.append([0], [step * 7 % VOCAB_SIZE])
        output.append(step * 7 % VOCAB_SIZE)
    found = apply(bench, [0], torch.zeros(1, VOCAB_SIZE))[0]
    expected = reference.constrained_logits(np.zeros(VOCAB_SIZE), params, [1], output)
    assert (np.abs(found - expected) <= 1e-5).all()


class Forcer(LogitsProcessor):
    """Forces the id in extra_args["force"], once; refuses negative ones."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device) -> None:
        super().__init__(vocab_size, max_num_seqs, device)
        self.forced: dict[int, int] = {}
        self.seen: list[list[int]] = []

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if (params.extra_args or {}).get("force", 0) < 0:
            raise ValidationError("force must be an id", field="extra_args")

    def is_argmax_invariant(self) -> bool:
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        extra_args = request.params.extra_args or {}
        if "force" in extra_args:
            self.forced[row] = extra_args["force"]
        return "force" in extra_args

    def remove_row(self, row: int) -> None:
        del self.forced[row]

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        self.seen.append(rows.tolist())
        forced = torch.full_like(logits, float("-inf"))
        for line, row in enumerate(rows.tolist()):
            forced[line, self.forced[row]] = 0.0
        return forced


class Broken(LogitsProcessor):
    """Raises, or returns nonsense, for requests that ask for it."""

    def is_argmax_invariant(self) -> bool:
        return False

    def add_row(self, row: int, request: RowRequest) -> bool:
        return request.params.extra_args is not None

    def remove_row(self, row: int) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        if len(rows) > 1:
            return logits[:, :3]
        raise KeyError("boom")


class OnlySmall(LogitsProcessor):
    """Keeps the argmax: drops everything but the likeliest."""

    def is_argmax_invariant(self) -> bool:
        return True

    def add_row(self, row: int, request: RowRequest) -> bool:
        return True

    def remove_row(self, row: int) -> None:
        pass

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        return logits.masked_fill(logits < logits.amax(1, keepdim=True), float("-inf"))


def test_a_custom_processor_sees_only_the_rows_it_acts_on(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(processors=(Forcer,))
    bench.add(0, SamplingParams(temperature=0))
    bench.add(3, SamplingParams(temperature=0, extra_args={"force": 44}))
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[:, 1] = 5.0
    assert bench.sample(logits, [0, 3]).token_ids.tolist() == [1, 44]
    assert bench.sample(logits, [3, 0]).token_ids.tolist() == [44, 1]
    bench.sample(logits[:1], [0])
    forcer = bench.states._processors[4]
    assert isinstance(forcer, Forcer) and forcer.seen == [[3], [3]]


def test_a_processor_that_keeps_the_argmax_acts_on_random_rows_only(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(processors=(OnlySmall,), mode="processed_logprobs")
    bench.add(0, SamplingParams(temperature=0, logprobs=1))
    bench.add(1, SamplingParams(temperature=2.0, logprobs=1))
    logits = torch.randn(2, VOCAB_SIZE)
    output = bench.sample(logits, [0, 1])
    assert output.token_ids.tolist() == logits.argmax(1).tolist()
    assert output.logprobs is not None
    assert output.logprobs.logprobs[0, 0] < -0.1 and output.logprobs.logprobs[1, 0] == 0.0


def test_a_failing_processor_is_named_in_the_error(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(processors=(Broken,))
    bench.add(0, SamplingParams(extra_args={"x": 1}))
    bench.add(1, SamplingParams(extra_args={"x": 1}))
    with pytest.raises(EngineGenerateError, match=r"Broken\.apply raised KeyError: 'boom'[\s\S]*hint: fix"):
        bench.sample(torch.zeros(1, VOCAB_SIZE), [0])
    with pytest.raises(EngineGenerateError, match=r"Broken\.apply raised ValueError: returned \(2, 3\)"):
        bench.sample(torch.zeros(2, VOCAB_SIZE), [0, 1])


def test_processors_are_loaded_by_class_or_by_name() -> None:
    loaded = load_processors([Forcer, "quire.sample.penalties:Penalties"])
    assert [processor.__name__ for processor in loaded] == ["Forcer", "Penalties"]
    with pytest.raises(ValidationError, match="force must be an id"):
        validate_params(loaded, SamplingParams(extra_args={"force": -1}))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (":NoModule", "malformed"),
        ("no_colon", "neither 'module:Class' nor the name of a plugin"),
        ("no.such.module:X", "cannot import"),
        ("quire.sample.penalties:Nope", "has no 'Nope'"),
        ("quire.sample.sampler:Sampler", "is not a LogitsProcessor class"),
        (int, "is not a LogitsProcessor class"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_a_hint(source: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_processors([source])  # type: ignore[list-item]
    assert caught.value.hint and caught.value.field == "logits_processors"
