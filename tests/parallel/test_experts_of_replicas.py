"""Experts that replicas share: answers are the bytes of one process, whatever the other replicas do, or do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.sampling_params import StructuredOutputsParams
from tests.effort import effort
from tests.models.families.cases import CASES
from tests.parallel.circumstances import CIRCUMSTANCES, PATTERN, SETTINGS, answers_of, requests
from tests.parallel.replicas import on_replicas, replicas_as_threads

VOCAB_SIZE = 320
KINDS: Mapping[str, Mapping[str, Any]] = {
    "evenly": {},
    "in turns": {"expert_placement_strategy": "round_robin"},
    "structured": {},
    "swapped, with suffixes": CIRCUMSTANCES["swapped, with suffixes"],
    "two ranks each": {"tensor_parallel_size": 2},
}


def asked(replica: int, *, structured: bool) -> tuple[list[Any], list[SamplingParams]]:
    """What a replica is asked: more and longer of the second."""
    prompts, params = requests(VOCAB_SIZE, max_tokens=effort((3, 6), (24, 40))[replica])
    if structured and replica:
        params[0] = SamplingParams(
            max_tokens=12, temperature=0, logprobs=1, structured_outputs=StructuredOutputsParams(regex=PATTERN)
        )
    return (prompts[:3], params[:3]) if replica == 0 else (prompts[::-1], params[::-1])


@pytest.mark.parametrize(
    ("family", "kind"),
    effort(
        (("mixtral", "evenly"), ("gpt_oss", "in turns")),
        (
            *(("llama4", "swapped, with suffixes"), ("mixtral", "two ranks each"), ("mixtral", "structured")),
            *((family, "evenly") for family in ("mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4")),
        ),
    ),
)
def test_answers_are_those_of_one_process_beside_a_busy_and_an_idle_replica(tmp_path: Path, family: str, kind: str):
    CASES[family].write(tmp_path)

    def answer(replica: int, llm: LLM) -> list[Any]:
        return answers_of(llm.generate(*asked(replica, structured="structured" in kind), use_tqdm=False))

    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = [answer(replica, llm) for replica in (0, 1)]
    with replicas_as_threads(tmp_path, 2, **{**SETTINGS, **KINDS[kind]}) as llms:
        assert on_replicas(llms, answer) == expected
        alone = on_replicas(llms, lambda replica, llm: answer(replica, llm) if replica else None)
        assert alone[1] == expected[1]
