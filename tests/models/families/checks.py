"""What every family is checked for, on a real engine with the family's tiny checkpoint.

Parity is with `transformers` in float32; the others compare tokens and log-probabilities to the bit with what the
same requests are answered together.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.core.sampling_params import StructuredOutputsParams
from quire.errors import ValidationError
from tests.effort import effort
from tests.models.checkpoints import VOCAB_SIZE
from tests.models.families.cases import Case

TOLERANCE = 1e-4  # of a log-probability, float32
NUM_PARITY_TOKENS = 48
LENGTHS = (1, 2, 7, 16, 17, 31, 33, 48, 63, 64, 65, 100, 129, 200, 257, 300)
SHORT_LENGTHS = (1, 5, 17, 40, 70, 100)
SETTINGS = {
    "dtype": "float32", "max_model_len": 384, "block_size": 16, "max_num_seqs": 16, "num_threads": 1,
    "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 600, "enable_prefix_caching": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_PARITY_TOKENS, ignore_eos=True, logprobs=1)
SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
Answers = list[tuple[tuple[int, ...], tuple[float, ...]]]


@dataclass
class Subject:
    """A family's checkpoint, and the answers that its checks share."""

    case: Case
    path: Path
    reference: Any
    logged: list[str] = field(default_factory=list)
    base: Answers | None = None

    def engine(self, **settings: Any) -> LLM:
        """A fresh engine."""
        return LLM(str(self.path), **{**SETTINGS, **self.case.settings, **settings})

    def expected(self) -> Answers:
        """What the short prompts are answered together."""
        if self.base is None:
            with self.engine() as llm:
                self.base = answers(ask(llm, SHORT_LENGTHS))
        return self.base


def prompts(lengths: Sequence[int], seed: int = 5) -> list[dict[str, list[int]]]:
    """Random prompts of these lengths, which all begin alike."""
    rng = random.Random(seed)
    ids = [rng.randrange(5, VOCAB_SIZE) for _ in range(32)]
    return [
        {"prompt_token_ids": (ids + [rng.randrange(5, VOCAB_SIZE) for _ in range(length)])[:length]}
        for length in lengths
    ]


def ask(llm: LLM, lengths: Sequence[int], params: SamplingParams = SHORT) -> list[RequestOutput]:
    """Answers to prompts of these lengths, submitted together."""
    return llm.generate(prompts(lengths), params, use_tqdm=False)


def answers(outputs: Sequence[RequestOutput]) -> Answers:
    """Tokens and their log-probabilities."""
    found: Answers = []
    for output in outputs:
        completion = output.outputs[0]
        assert completion.logprobs is not None
        lines = zip(completion.logprobs, completion.token_ids, strict=True)
        found.append((tuple(completion.token_ids), tuple(line[token].logprob for line, token in lines)))
    return found


def parity(subject: Subject) -> None:
    """16 prompts of 1 to 300 tokens together: every token is the argmax of transformers, log-probabilities agree."""
    lengths = LENGTHS[:: effort(2, 1)]
    with subject.engine() as llm:
        outputs = ask(llm, lengths, GREEDY)
    for output in outputs:
        prompt, completion = output.prompt_token_ids, output.outputs[0]
        assert len(completion.token_ids) == NUM_PARITY_TOKENS
        with torch.inference_mode():
            logits = subject.reference(torch.tensor([[*prompt, *completion.token_ids[:-1]]])).logits[0]
        scores = torch.log_softmax(logits[len(prompt) - 1 :].float(), dim=-1)
        ((_, logprobs),) = answers([output])
        theirs = scores.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        difference = (torch.tensor(logprobs) - theirs).abs().max().item()
        assert difference <= TOLERANCE, f"prompt of {len(prompt)} tokens: {difference}"
        assert scores.argmax(-1).tolist() == completion.token_ids, f"prompt of {len(prompt)} tokens"


def prefix_hit(subject: Subject) -> None:
    """Asked again, prompts find their beginning in the cache and get the same bits."""
    with subject.engine(enable_prefix_caching=True) as llm:
        first, second = ask(llm, SHORT_LENGTHS), ask(llm, SHORT_LENGTHS)
    assert answers(first) == answers(second) == subject.expected()
    assert second[-1].num_cached_tokens >= 64, second[-1].num_cached_tokens


def chunked_prompt(subject: Subject) -> None:
    """Prompts in chunks of 1, 7 and 64 tokens."""
    for chunk in effort((7,), (1, 7, 64)):
        with subject.engine(long_prefill_token_threshold=chunk) as llm:
            assert answers(ask(llm, SHORT_LENGTHS)) == subject.expected(), chunk


def preempted(subject: Subject) -> None:
    """In a cache with room for half of the requests."""
    _preempted(subject, preemption_mode="recompute")


def swapped(subject: Subject) -> None:
    """The same, and what is preempted is swapped out and in."""
    _preempted(subject, preemption_mode="swap", swap_space=0.01)


def _preempted(subject: Subject, **settings: Any) -> None:
    # With the most blocks that a request needs, and few more: later requests are admitted and have to give way.
    for num_blocks in (12, 16, 24):
        pool = {"num_gpu_blocks_override": num_blocks, "max_model_len": 128, "max_num_batched_tokens": 64}
        with subject.engine(scheduler_reserve_full_isl=False, **pool, **settings) as llm:
            try:
                outputs = ask(llm, SHORT_LENGTHS)
            except ValidationError:  # the longest request needs more
                continue
            assert answers(outputs) == subject.expected(), num_blocks
        if sum(output.metrics.num_preemptions for output in outputs if output.metrics):
            return
    raise AssertionError("nothing was preempted")


def same_bits(subject: Subject) -> None:
    """Each request alone, on two threads, and on the slowest tier."""
    alone, on_threads = {"max_num_seqs": 1, "enforce_eager": True}, {"max_num_seqs": 3, "num_threads": 2}
    for settings in (*effort(({**on_threads, **alone},), (alone, on_threads)), {"kernel_tier": "portable"}):
        with subject.engine(**settings) as llm:
            assert answers(ask(llm, SHORT_LENGTHS)) == subject.expected(), settings


def structured(subject: Subject) -> None:
    """Answers within a pattern."""
    pattern = StructuredOutputsParams(regex="(ab|ba){3,9}")
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=pattern)
    with subject.engine() as llm:
        for output in ask(llm, (3, 40), params):
            assert re.fullmatch("(ab|ba){3,9}", output.outputs[0].text), output.outputs[0].text


def int8(subject: Subject) -> None:
    """The same bits alone and together, and not far from float32."""
    _quantized(subject, "int8", 0.3)


def int4(subject: Subject) -> None:
    """The same bits alone and together."""
    _quantized(subject, "int4", None)


def _quantized(subject: Subject, quantization: str, tolerance: float | None) -> None:
    found = []
    for max_num_seqs in (1, 16):
        with subject.engine(quantization=quantization, max_num_seqs=max_num_seqs) as llm:
            found.append(answers(ask(llm, SHORT_LENGTHS)))
    assert found[0] == found[1]
    if tolerance is not None:
        first = [(ours[1][0], theirs[1][0]) for ours, theirs in zip(found[0], subject.expected(), strict=True)]
        assert sum(abs(ours - theirs) for ours, theirs in first) / len(first) < tolerance, first


def captured(subject: Subject) -> None:
    """Decode steps are recorded native calls: nothing but kernels computes them."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("quire.worker.device.recorded_steps")
    logger.addHandler(handler)
    try:
        with subject.engine() as llm:
            assert answers(ask(llm, SHORT_LENGTHS)) == subject.expected()
    finally:
        logger.removeHandler(handler)
    assert not records, records


CHECKS: Mapping[str, Callable[[Subject], None]] = {
    "parity": parity, "prefix hit": prefix_hit, "chunked prompt": chunked_prompt, "preempted": preempted,
    "swapped": swapped, "same bits": same_bits, "structured": structured, "int8": int8, "int4": int4,
    "captured steps": captured,
}  # fmt: skip
"""Column of the page -> its check."""
