"""Processors in vLLM's interface under Quire's sampler: places without holes, outputs that grow, the right lines."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from quire.compat.vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from quire.compat.vllm.v1.sample.logits_processor.builtin import process_dict_updates
from quire.core.sampling_params import SamplingParams
from quire.errors import UnsupportedError, ValidationError
from quire.sample.logits_processor import RowRequest, load_processors, validate_params

VOCAB, ROWS = 16, 6
CPU = torch.device("cpu")


class OnlyTarget(LogitsProcessor):
    """As vLLM's examples: requests with a target get nothing else; it also adds the number of tokens that came."""

    def __init__(self, vllm_config, device, is_pin_memory):
        assert vllm_config.scheduler_config.max_num_seqs == ROWS and vllm_config.model_config.get_vocab_size() == VOCAB
        self.requests: dict[int, tuple[int, list[int]]] = {}
        self.sizes: list[int] = []

    @classmethod
    def validate_params(cls, params):
        if not isinstance((params.extra_args or {}).get("target", 0), int):
            raise ValueError("target is not an int")

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(self.requests, batch_update, self.entry)
        if batch_update is not None:
            self.sizes.append(batch_update.batch_size)

    @staticmethod
    def entry(params, prompt, output):
        return ((params.extra_args or {})["target"], output) if params.extra_args else None

    def apply(self, logits):
        for place, (target, output) in self.requests.items():
            kept = logits[place, target] + len(output)
            logits[place] = float("-inf")
            logits[place, target] = kept
        return logits


def request(target: int | None, output=()) -> RowRequest:
    return RowRequest(
        params=SamplingParams(extra_args=None if target is None else {"target": target}),
        prompt_token_ids=np.array([1, 2], np.int32),
        output_token_ids=np.array(output, np.int32),
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_line_gets_its_own_requests_rule_whatever_comes_and_goes(seed):
    rng = random.Random(seed)
    processor = OnlyTarget.create(VOCAB, ROWS, CPU)
    running: dict[int, tuple[int | None, int]] = {}
    for _ in range(60):
        for row in [row for row in running if rng.random() < 0.2]:
            processor.remove_row(row)
            del running[row]
        for row in [row for row in range(ROWS) if row not in running and rng.random() < 0.4]:
            target, count = rng.choice([None, *range(VOCAB)]), rng.randrange(3)
            assert processor.add_row(row, request(target, [0] * count))
            running[row] = target, count
        rows = rng.sample(sorted(running), rng.randint(0, len(running)))
        if not rows:
            continue
        logits = torch.rand(len(rows), VOCAB)
        changed = processor.apply(logits.clone(), np.array(rows, np.int32))
        for line, row in enumerate(rows):
            target, count = running[row]
            expected = logits[line].clone()
            if target is not None:
                expected[:] = float("-inf")
                expected[target] = logits[line, target] + count
            assert torch.equal(changed[line], expected)
        processor.append(np.array(rows, np.int32), np.zeros(len(rows), np.int32))
        running.update({row: (running[row][0], running[row][1] + 1) for row in rows})


def test_a_batch_has_no_holes():
    processor = OnlyTarget.create(VOCAB, ROWS, CPU)
    for row in range(4):
        processor.add_row(row, request(row))
    everyone = np.arange(4, dtype=np.int32)
    processor.apply(torch.rand(4, VOCAB), everyone)
    processor.remove_row(0)
    processor.remove_row(2)
    processor.apply(torch.rand(2, VOCAB), np.array([1, 3], np.int32))
    inner = processor._inner
    assert inner.sizes == [4, 2] and sorted(inner.requests) == [0, 1]


class PerRequest(AdapterLogitsProcessor):
    """Gives requests with a target that token, and leaves the others."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        target = (params.extra_args or {}).get("target")
        if target is None:
            return None

        def change(prompt_ids, output_ids, logits):
            logits[target] = len(prompt_ids) * 100.0 + len(output_ids)
            return logits

        return change


def test_a_function_for_each_request():
    processor = PerRequest.create(VOCAB, ROWS, CPU)
    processor.add_row(3, request(5, output=[7]))
    processor.add_row(1, request(None))
    logits = torch.zeros(2, VOCAB)
    changed = processor.apply(logits.clone(), np.array([1, 3], np.int32))
    assert torch.equal(changed[0], logits[0]) and changed[1, 5] == 201.0


def test_a_wrong_parameter_is_refused_before_the_request_is_queued():
    classes = load_processors([OnlyTarget, "tests.unit.compat.test_vllm_logits_processor:PerRequest"])
    validate_params(classes, SamplingParams(extra_args={"target": 3}))
    with pytest.raises(ValidationError, match="OnlyTarget: target is not an int"):
        validate_params(classes, SamplingParams(extra_args={"target": "x"}))


def test_swaps_are_followed_too():
    entries = {0: "a", 1: "b"}
    swap = BatchUpdate(2, [], [], [(0, 1, MoveDirectionality.SWAP)])
    assert process_dict_updates(entries, swap, lambda *_: None) and entries == {0: "b", 1: "a"}
    assert not process_dict_updates(entries, None, lambda *_: None)


def test_processors_of_the_second_model_runner_name_what_they_are():
    with pytest.raises(ImportError, match="second model runner"):
        import quire.compat.vllm.v1.worker.gpu.sample.logits_processor  # noqa: F401


def test_a_class_that_is_missing_can_be_imported_and_says_so_when_it_is_made():
    from quire.compat.vllm.config import PoolerConfig
    from quire.compat.vllm.lora.request import LoRARequest

    for kind in (PoolerConfig, LoRARequest):
        with pytest.raises(UnsupportedError, match=f"{kind.__name__}: Quire does not support"):
            kind("a", 1)


def test_a_tokenizer_without_an_engine():
    from quire.compat.vllm.tokenizers import get_tokenizer

    assert get_tokenizer("leaf").decode(get_tokenizer("leaf").encode("Once upon")) == "Once upon"
