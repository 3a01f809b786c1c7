"""Tests of the tokenizer and the chat template (on a small, freshly trained BPE)."""

from __future__ import annotations

import json

import jinja2
import pytest
from tokenizers import Tokenizer

from training import tokenizer as tok
from training.corpus.base import Sample, assistant, system, user
from training.corpus.registry import held_out_samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tok.save(tok.train_tokenizer(600, 700, seed=1), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _template(folder):
    env = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda v: json.dumps(v, ensure_ascii=False)
    return env.from_string(json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.encode("2024+17").tokens == list("2024+17")


@pytest.mark.parametrize(
    "text", ["Hello, world!", "naïve 東京 🙂\n\tx  y ", "".join(map(chr, range(1, 256))), '{"a": [1, 2]}']
)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens(tokenizer):
    assert [tokenizer.token_to_id(t) for t in tok.SPECIAL] == [tok.END_OF_TEXT, tok.IM_START, tok.IM_END]
    text = "<|im_start|><think>x</think><tool_call><|im_end|>"
    ids = tokenizer.encode(text).ids
    assert len(ids) == 6
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>x</think><tool_call>"


@pytest.mark.parametrize("task", ["sums", "story_questions", "tool_calls", "tool_answers", "thinking"])
def test_template_equals_training_text(folder, task):
    template = _template(folder)
    for sample in held_out_samples(task, 10):
        text = template.render(messages=sample.messages, tools=sample.tools, add_generation_prompt=True)
        assert text == tok.prompt_text(sample)


def test_template_with_history_and_parallel_tools(folder):
    calls = [{"function": {"name": "f", "arguments": {"a": i}}} for i in (1, 2)]
    messages = [
        system("s"),
        user("u"),
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        assistant("a"),
        user("v"),
    ]
    sample = Sample("x", messages, "w", tools=[{"type": "function", "function": {"name": "f"}}])
    text = _template(folder).render(messages=messages, tools=sample.tools, add_generation_prompt=True)
    assert text == tok.prompt_text(sample)
    assert text.count("<tool_response>") == 2 and text.count("<|im_start|>user") == 3
    calls[0]["function"]["arguments"] = '{"a": 1}'
    assert _template(folder).render(messages=messages, tools=sample.tools, add_generation_prompt=True) == text
