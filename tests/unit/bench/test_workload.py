"""Prompts and arrival times: as asked, and the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.bench.workload import (
    RandomLengths,
    arrival_times,
    file_questions,
    make_jobs,
    random_questions,
)
from quire.errors import ConfigError, ValidationError


def test_random_prompts_have_the_asked_lengths_and_prefix():
    lengths = RandomLengths(input_len=40, output_len=20, range_ratio=0.5, prefix_len=7, vocab_size=300)
    questions = random_questions(200, lengths, 1, is_chat=False)
    prompts = [question.prompt for question in questions]
    assert {len(prompt) - 7 for prompt in prompts} >= {20, 60} and all(27 <= len(one) <= 67 for one in prompts)
    assert {tuple(prompt[:7]) for prompt in prompts} == {tuple(prompts[0][:7])}
    assert all(100 <= one < 300 for prompt in prompts for one in prompt)
    assert {question.max_tokens for question in questions} == set(range(10, 31))
    assert (
        random_questions(200, lengths, 1, is_chat=False)
        == questions
        != random_questions(200, lengths, 2, is_chat=False)
    )


def test_random_chats_are_words():
    (question,) = random_questions(1, RandomLengths(input_len=12, output_len=5), 0, is_chat=True)
    assert question.prompt is None and len(question.messages[0]["content"].split()) == 12


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 50.0])
def test_arrivals_have_the_asked_rate_and_burstiness(burstiness: float):
    times = np.asarray(arrival_times(4000, 20.0, burstiness, 3))
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all() and 195 < times[-1] < 200
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.15)


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times(3, float("inf"), 1.0, 0) == [0.0, 0.0, 0.0]


def test_bodies_have_standard_fields_and_what_was_added():
    questions = random_questions(1, RandomLengths(input_len=2, output_len=5), 0, is_chat=False)
    (job,) = make_jobs(questions, [1.5], model="m", is_chat=False, fields={})
    body = json.loads(job.body)
    assert (job.index, job.due_s) == (0, 1.5)
    assert set(body) == {"model", "prompt", "max_tokens", "stream", "stream_options"}
    assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    (job,) = make_jobs(questions, [0], model="m", is_chat=False, fields={"top_k": 1, "max_tokens": 9})
    assert json.loads(job.body)["top_k"] == 1 and json.loads(job.body)["max_tokens"] == 9
    with pytest.raises(ValidationError, match="stream"):
        make_jobs(questions, [0], model="m", is_chat=False, fields={"stream": False})


def test_a_file_of_lines_holds_prompts_ids_and_conversations(tmp_path: Path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "One"}\n\n{"prompt": [5, 6], "output_tokens": 3}\n')
    found = file_questions("custom", str(file), 2, 50, 0, is_chat=False)
    assert sorted((str(one.prompt), one.max_tokens) for one in found) == [("One", 50), ("[5, 6]", 3)]
    file.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n{"prompt": "One"}\n')
    found = file_questions("custom", str(file), 2, 50, 0, is_chat=True)
    assert sorted(one.messages[0]["content"] for one in found) == ["Hi", "One"]


def test_the_first_turns_of_shared_conversations_are_asked(tmp_path: Path):
    file = tmp_path / "data.json"
    records = [{"conversations": [{"from": "human", "value": "Why?"}, {"value": "So."}]}, {"conversations": []}]
    file.write_text(json.dumps(records))
    (question,) = file_questions("sharegpt", str(file), 1, 8, 0, is_chat=False)
    assert (question.prompt, question.max_tokens) == ("Why?", 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{broken", "JSON lines"), ('{"prompt": ""}', "record 1"), ("7", "record 1"),
        ('{"prompt": [1, "x"]}', "record 1"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens"), ("", "has 0 requests"),
    ],
    ids=["broken", "empty prompt", "no object", "wrong ids", "no tokens", "no lines"],
)  # fmt: skip
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, content: str, message: str):
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(ValidationError, match=message):
        file_questions("custom", str(file), 1, 8, 0, is_chat=False)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        file_questions("custom", str(tmp_path / "none"), 1, 8, 0, is_chat=False)
