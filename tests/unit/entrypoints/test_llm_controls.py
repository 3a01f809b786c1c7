"""What LLM can do beside generating, and what it says of what it cannot, over a pretended engine core."""

from __future__ import annotations

import dataclasses

import pytest

from quire.core.outputs import RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.entrypoints.llm import LLM
from quire.errors import UnsupportedError, ValidationError
from tests.unit.engine.fakes import FakeClient, make_engine

PARAMS = SamplingParams(max_tokens=50)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def llm(client: FakeClient) -> LLM:
    return LLM.from_engine(make_engine(client))


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("encode", "pooling models"), ("embed", "pooling models"), ("classify", "pooling models"),
        ("score", "pooling models"), ("reward", "pooling models"),
        ("release_kv_cache_memory", r"use sleep\(\)"), ("update_weights", "from a directory"),
        ("start_weight_update", "from a directory"),
    ],
)  # fmt: skip
def test_a_method_that_is_missing_names_its_feature(llm, name, feature):
    with pytest.raises(UnsupportedError, match=rf"LLM\.{name}: .*{feature}"):
        getattr(llm, name)("a text", level=1)


def test_a_worker_elsewhere_cannot_be_called(llm):
    with pytest.raises(ValidationError, match="'anything' cannot be called on every rank"):
        llm.collective_rpc("anything")
    with pytest.raises(UnsupportedError, match="workers of this engine cannot be called"):
        llm.collective_rpc("memory_parts")
    with pytest.raises(UnsupportedError, match="no code is sent"):
        llm.apply_model(lambda model: model)


def test_workers_of_several_processes_are_counted(llm):
    config = llm.llm_engine.config
    parallel = dataclasses.replace(
        config.parallel, tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=3
    )
    llm.llm_engine.config = dataclasses.replace(config, parallel=parallel)
    assert (llm.get_world_size(), llm.get_world_size(include_dp=False)) == (12, 4)


def test_figures_are_there_only_where_they_are_counted(llm):
    with pytest.raises(ValidationError, match=r"no statistics.*\nhint: .*disable_log_stats=False"):
        llm.get_metrics()


def test_conversations_are_enqueued_and_answered_later(llm):
    chats = [[{"role": "user", "content": text}] for text in ("fox", "a")]
    names = llm.enqueue_chat(chats, PARAMS, chat_template="{{ messages[0].content }}")
    with pytest.raises(UnsupportedError, match="output_type"):
        llm.wait_for_completion(dict)
    outputs = llm.wait_for_completion(RequestOutput)
    assert [output.request_id for output in outputs] == names and texts(outputs) == ["fox", "a"]


def test_keys_of_prompts_without_a_value_and_fields_of_adapters_are_there(llm):
    (output,) = llm.generate({"prompt": "fox", "multi_modal_data": None, "encoder_prompt": None}, PARAMS)
    assert (output.lora_request, output.encoder_prompt, output.outputs[0].lora_request) == (None, None, None)
    with pytest.raises(UnsupportedError, match="multi_modal_data"):
        llm.generate({"prompt": "fox", "multi_modal_data": {"image": 1}}, PARAMS)


def test_one_priority_may_stand_for_all_prompts(llm, client):
    with pytest.raises(ValidationError, match="scheduling_policy"):  # asked of each, and without effect here
        llm.generate(["fox", "a"], PARAMS, priority=1)
    assert texts(llm.generate(["fox", "a"], PARAMS, priority=0)) == ["fox", "a"]
    with pytest.raises(ValidationError, match="priority is a list of 1 for 2 prompts"):
        llm.generate(["fox", "a"], PARAMS, priority=[1])


@pytest.mark.parametrize("params", [{"max_tokens": 3}, "greedy", 3], ids=["dict", "text", "number"])
def test_parameters_of_another_type_are_named_with_theirs(llm, params):
    kind = type(params).__name__
    with pytest.raises(
        ValidationError, match=f"sampling_params must be a SamplingParams, or a list of them, not {kind}"
    ):
        llm.generate("fox", params)


def test_a_text_is_not_a_conversation(llm):
    with pytest.raises(ValidationError, match=r"messages must be a list of messages, not str\nhint: .*generate\(\)"):
        llm.chat("hi")


def test_texts_of_one_call_are_tokenized_at_once(llm, client, monkeypatch):
    tokenizer = llm.llm_engine.tokenizer
    calls = []
    whole = type(tokenizer).encode_batch

    def counted(self, some, *args):
        calls.append(len(some))
        return whole(self, some, *args)

    monkeypatch.setattr(type(tokenizer), "encode_batch", counted)
    outputs = llm.generate(["fox", {"prompt": "a"}, [5, 6], "the"], PARAMS)
    assert calls == [3]
    assert [output.prompt for output in outputs] == ["fox", "a", None, "the"]
    assert client.requests[0].prompt_token_ids.tolist() == tokenizer.encode("fox")


def test_repeated_bad_words_count_once():
    assert SamplingParams(bad_words=["no", "never", "no"]).bad_words == ["no", "never"]


def test_arguments_for_other_engines_are_refused_by_name():
    with pytest.raises(UnsupportedError, match="ec_transfer_params"):
        SamplingParams(extra_args={"ec_transfer_params": {}})
    with pytest.raises(UnsupportedError, match="flat_logprobs"):
        SamplingParams(flat_logprobs=True)
    assert SamplingParams(skip_clone=True).n == 1
