"""Conversations with a GGUF file: its own tokenizer, template and ends of turns, on a real engine."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.compat.vllm.tokenizers import get_tokenizer
from quire.parsers.registry import parser_of_template
from tests.models.stored_models import make_leaf
from tests.unit.tokenization.gguf_metadata import corpus

GREEDY = SamplingParams(temperature=0, max_tokens=60)
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(model=str(make_leaf("Q4_K_M", tmp_path_factory.mktemp("leaf"))), max_model_len=512, max_num_seqs=4)


def test_the_tokenizer_is_that_of_the_directory_that_the_file_was_made_from(llm):
    ours, theirs = llm.get_tokenizer(), get_tokenizer("leaf")
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours(corpus()).input_ids == theirs(corpus()).input_ids
    for options in ({}, {"add_generation_prompt": True}, {"tools": TOOLS}):
        chat = [{"role": "user", "content": "Hello <|im_end|> there"}]
        assert ours.apply_chat_template(chat, **options) == theirs.apply_chat_template(chat, **options)


def test_an_answer_stops_at_the_end_of_its_turn(llm):
    answer = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.text and "<|" not in answer.text
    assert answer.token_ids[-1] == llm.get_tokenizer().eos_token_id


def test_tools_are_called_in_the_form_that_the_template_shows(llm):
    template = llm.get_tokenizer().chat_template
    assert parser_of_template(template) == "hermes"
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    answer = llm.chat(question, GREEDY, tools=TOOLS)[0].outputs[0]
    assert answer.text.startswith("<tool_call>") and "get_weather" in answer.text
