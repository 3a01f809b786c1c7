"""Beam search gives the sequences and scores of transformers, and changes nobody else's tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.beam_search import BeamSearchOutput
from quire.engine.beam_search import request_params, search_output
from quire.errors import UnsupportedError, ValidationError
from tests.models.checkpoints import VOCAB_SIZE, make_checkpoint

TOLERANCE = 1e-4
NUM_BEAMS = 4
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 160, "block_size": 16, "max_num_seqs": 32, "num_threads": 1,
}  # fmt: skip
NGRAMS = {"method": "ngram", "prompt_lookup_min": 1, "enable_adaptive_verification": False}
PENALTIES = (0.8, 1.0, 1.2)
STOPPINGS: tuple[bool | str, ...] = (True, False, "never")
ENDS = ("none", "one", "three")


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 16, 17, 40)]


PROMPTS = make_prompts()


class Reference:
    """transformers' own beam search."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def search(
        self, prompt: list[int], max_tokens: int, ends: list[int], penalty: float, stopping: bool | str, width: int
    ) -> list[tuple[list[int], float]]:
        """(new tokens, score) of each sequence, the best first."""
        found = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=ends or None,
            pad_token_id=0,
            length_penalty=penalty,
            early_stopping=stopping,
            return_dict_in_generate=True,
            output_scores=True,
        )
        sequences = [line[len(prompt) :] for line in found.sequences.tolist()]
        cut = [self._cut(line, beams, ends) for line, beams in zip(sequences, found.beam_indices.tolist(), strict=True)]
        return list(zip(cut, found.sequences_scores.tolist(), strict=True))

    @staticmethod
    def _cut(tokens: list[int], beams: list[int], ends: list[int]) -> list[int]:
        """Without padding."""
        length = sum(beam >= 0 for beam in beams)
        return tokens[:length]


def write_ends(path: Path, ends: list[int]) -> None:
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends or None}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", path)
    return path


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


@pytest.fixture(scope="module")
def end_sets(reference: Reference) -> dict[str, list[int]]:
    """Ids that beams of these prompts come to, taken for ends."""
    best = [reference.search(prompt, 12, [], 1.0, False, NUM_BEAMS)[0][0] for prompt in PROMPTS]
    return {"none": [], "one": [best[2][5]], "three": [best[2][5], best[3][7], best[4][3]]}


@pytest.fixture(params=ENDS)
def ends(request: pytest.FixtureRequest, end_sets: dict[str, list[int]]) -> list[int]:
    return end_sets[request.param]


def params(
    max_tokens: int, ends: list[int], penalty: float = 1.0, stopping: bool | str = False, width: int = NUM_BEAMS
):
    return BeamSearchParams(
        beam_width=width, max_tokens=max_tokens, ignore_eos=not ends, length_penalty=penalty, early_stopping=stopping,
        include_stop_str_in_output=True,
    )  # fmt: skip


def check(found: BeamSearchOutput, prompt: list[int], expected: list[tuple[list[int], float]]) -> None:
    assert [one.tokens[len(prompt) :] for one in found.sequences] == [tokens for tokens, _ in expected]
    for one, (_, score) in zip(found.sequences, expected, strict=True):
        assert one.score == pytest.approx(score, abs=TOLERANCE)


@pytest.mark.parametrize("stopping", STOPPINGS, ids=str)
def test_sequences_and_scores_equal_those_of_transformers(checkpoint, reference, ends, stopping):
    write_ends(checkpoint, ends)
    num_stopped = 0
    with LLM(str(checkpoint), skip_tokenizer_init=True, **SETTINGS) as llm:
        for penalty in PENALTIES:
            for max_tokens, prompts in ((2, PROMPTS[:1]), (13, PROMPTS[1 + PENALTIES.index(penalty) :][:2])):
                found = llm.beam_search(prompts, params(max_tokens, ends, penalty, stopping))
                for one, prompt in zip(found, prompts, strict=True):
                    check(one, prompt, reference.search(prompt, max_tokens, ends, penalty, stopping, NUM_BEAMS))
                    num_stopped += sum(sequence.finish_reason == "stop" for sequence in one.sequences)
    assert (num_stopped > 0) == bool(ends)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 32},
        {"num_gpu_blocks_override": 22},
        {"max_num_seqs": 5},
        {"num_gpu_blocks_override": 22, "speculative_config": NGRAMS},
    ],
    ids=["caching off", "in chunks", "preempted", "few rows", "preempted, neighbours draft"],
)
def test_neither_beams_nor_their_neighbours_depend_on_the_crowd(checkpoint, settings):
    write_ends(checkpoint, [2])
    search = params(24, [2])
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    with LLM(str(checkpoint), **SETTINGS) as llm:
        expected = [llm.beam_search([prompt], search)[0] for prompt in PROMPTS]
        expected_others = [llm.generate([prompt], greedy, use_tqdm=False)[0].outputs[0] for prompt in PROMPTS]
    with LLM(str(checkpoint), **{**SETTINGS, **settings}) as llm:
        llm.enqueue(PROMPTS, request_params(search))
        llm.enqueue(PROMPTS, greedy)
        outputs = llm.wait_for_completion(use_tqdm=False)
        searched, others = outputs[: len(PROMPTS)], outputs[len(PROMPTS) :]
        assert [search_output(one, search, llm.llm_engine.tokenizer) for one in searched] == expected
    drafts = [one.outputs[0].spec_decode_metrics for one in (*searched, *others)]
    if "speculative_config" in settings:
        assert not any(drafts[: len(PROMPTS)]) and sum(one.num_accepted for one in drafts if one) > 0
    found = [msgspec.structs.replace(one.outputs[0], spec_decode_metrics=None) for one in others]
    assert found == expected_others
    if "num_gpu_blocks_override" in settings:
        for some in (searched, others):
            assert sum(one.metrics.num_preemptions for one in some) > 0


def test_tokens_and_text_are_the_prompts_and_the_answers(checkpoint):
    write_ends(checkpoint, [2])
    with LLM(str(checkpoint), **SETTINGS) as llm:
        (found,) = llm.beam_search("The quick brown", params(6, []))
        prompt = llm.get_tokenizer().encode("The quick brown")
        for one in found.sequences:
            assert one.tokens[: len(prompt)] == prompt and len(one.tokens) == len(prompt) + 6
            assert (
                one.text == llm.get_tokenizer().decode(one.tokens, skip_special_tokens=True)
                and one.finish_reason == "length"
            )
            assert one.score == pytest.approx(one.cum_logprob / 6)
        scores = [one.score for one in found.sequences]
        assert scores == sorted(scores, reverse=True)
        (greedy,) = llm.generate("The quick brown", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        (narrow,) = llm.beam_search("The quick brown", params(6, [], width=1))
        assert narrow.sequences[0].tokens == prompt + greedy.outputs[0].token_ids
        one_by_one = llm.beam_search(PROMPTS, params(6, []), concurrency_limit=1)
        assert one_by_one == llm.beam_search(PROMPTS, params(6, []))


def test_the_end_token_is_left_out_unless_asked_for(checkpoint, reference, end_sets):
    ends = end_sets["one"]
    write_ends(checkpoint, ends)
    kept = params(13, ends)
    cut = BeamSearchParams(beam_width=NUM_BEAMS, max_tokens=13)
    with LLM(str(checkpoint), skip_tokenizer_init=True, **SETTINGS) as llm:
        (whole,), (short,) = llm.beam_search(PROMPTS[2], kept), llm.beam_search(PROMPTS[2], cut)
    stopped = [i for i, one in enumerate(whole.sequences) if one.finish_reason == "stop"]
    assert stopped
    for i in stopped:
        assert whole.sequences[i].tokens == [*short.sequences[i].tokens, *ends]
        assert whole.sequences[i].cum_logprob == short.sequences[i].cum_logprob


@pytest.mark.parametrize(
    ("settings", "values", "message"),
    [
        ({"max_num_seqs": 3}, {}, "max_num_seqs=3"),
        ({"num_gpu_blocks_override": 8}, {"max_tokens": 90}, "beams may need"),
        ({}, {"beam_width": 200}, "the vocabulary has"),
        ({"logprobs_mode": "raw_logits"}, {}, "log-probabilities"),
    ],
)
def test_a_search_that_cannot_run_is_refused_with_the_reason(checkpoint, settings, values, message):
    write_ends(checkpoint, [2])
    with LLM(str(checkpoint), **{**SETTINGS, **settings}) as llm:
        with pytest.raises(ValidationError, match=message):
            llm.beam_search([5] * 20, BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, **values}))
        assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "values",
    [{"beam_width": 0}, {"max_tokens": 0}, {"early_stopping": "maybe"}, {"length_penalty": "x"},
     {"allowed_token_ids": [1]}, {"temperature": -1.0}],
    ids=lambda values: next(iter(values)),
)  # fmt: skip
def test_wrong_parameters_are_named(values):
    with pytest.raises((ValidationError, UnsupportedError)) as caught:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **values})
    assert caught.value.field == next(iter(values))
