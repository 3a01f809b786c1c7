"""LLM over a pretended engine core: order, arguments, and nothing left behind when something goes wrong."""

from __future__ import annotations

import pytest

from quire.core.sampling_params import SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.llm import LLM
from quire.errors import ChatTemplateError, ConfigError, EngineDeadError, UnsupportedError, ValidationError
from tests.unit.engine.fakes import EOS, FakeClient, ids, make_engine

PARAMS = SamplingParams(max_tokens=50)
TEXTS = ["the quick brown fox jumps", "fox", "pages are gathered", "a"]


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def llm(client: FakeClient) -> LLM:
    return LLM.from_engine(make_engine(client))


def texts(outputs):
    return [output.outputs[0].text for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts(llm):
    assert texts(llm.generate(TEXTS, PARAMS)) == TEXTS


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], PARAMS) == []
    assert llm.wait_for_completion() == []


@pytest.mark.parametrize(
    "prompts",
    ["fox", ["fox"], ids("fox"), [ids("fox")], {"prompt": "fox"}, [{"prompt_token_ids": ids("fox")}]],
    ids=["text", "texts", "ids", "lists of ids", "dict", "dicts"],
)
def test_one_prompt_in_any_form(llm, prompts):
    assert texts(llm.generate(prompts, PARAMS)) == ["fox"]


def test_parameters_one_for_each_prompt(llm):
    outputs = llm.generate(TEXTS[:2], [SamplingParams(max_tokens=1), PARAMS])
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "stop"]


def test_the_callers_parameters_stay_as_they_are(llm):
    params = SamplingParams(max_tokens=3)
    before = params.clone()
    llm.generate("fox", params)
    assert params == before


@pytest.mark.parametrize("params", [[PARAMS], [PARAMS] * 3, "x", [PARAMS, "x"], {"temperature": 0}])
def test_parameters_of_a_wrong_number_or_type_are_refused(llm, client, params):
    with pytest.raises(ValidationError, match="sampling_params"):
        llm.generate(TEXTS[:2], params)
    assert not client.requests


def test_defaults_are_the_models_own(client):
    llm = LLM.from_engine(make_engine(client, sampling={"temperature": 0.5, "max_tokens": 3}))
    assert llm.get_default_sampling_params().temperature == 0.5
    (output,) = llm.generate("pages are gathered")
    assert len(output.outputs[0].token_ids) == 3


def test_enqueue_then_wait(llm):
    names = llm.enqueue(TEXTS[:2], PARAMS) + llm.enqueue(TEXTS[2], PARAMS)
    outputs = llm.wait_for_completion()
    assert [output.request_id for output in outputs] == names
    assert texts(outputs) == TEXTS[:3]
    assert llm.wait_for_completion() == []


def test_generating_between_enqueue_and_wait_loses_nothing(llm):
    llm.enqueue("fox", SamplingParams(max_tokens=1))
    assert texts(llm.generate(TEXTS[0], PARAMS)) == [TEXTS[0]]
    assert len(llm.wait_for_completion()) == 1


def test_a_wrong_prompt_withdraws_the_others(llm, client):
    with pytest.raises(ValidationError):
        llm.generate(["fox", [10**6], "a"], PARAMS)
    assert not client.live
    assert not llm.llm_engine.has_unfinished_requests()
    assert texts(llm.generate("fox", PARAMS)) == ["fox"]


def test_an_interrupt_withdraws_everything(llm, client, monkeypatch):
    step = LLMEngine.step
    calls = []

    def interrupted(engine):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(TEXTS, PARAMS)
    assert not client.live
    assert texts(llm.generate("fox", PARAMS)) == ["fox"]


def test_a_dead_engine_is_reported(llm, client):
    client.fails_at_step = 0
    with pytest.raises(EngineDeadError, match="the device is gone"):
        llm.generate("fox", PARAMS)
    with pytest.raises(EngineDeadError):
        llm.generate("fox", PARAMS)


@pytest.mark.parametrize(
    "arguments",
    [
        {"lora_request": object()},
        {"mm_processor_kwargs": {"a": 1}},
        {"tokenization_kwargs": {"truncation": True}},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_arguments_that_are_not_supported_are_refused_by_name(llm, arguments):
    with pytest.raises(UnsupportedError, match=next(iter(arguments))):
        llm.generate("fox", PARAMS, **arguments)


def test_special_tokens_can_be_left_out(llm, client):
    llm.generate("fox", PARAMS, tokenization_kwargs={"add_special_tokens": False})
    assert client.requests[0].prompt_token_ids.tolist() == ids("fox")


class TestChat:
    MESSAGES = ({"role": "user", "content": "hi"},)

    def test_the_template_writes_the_prompt_and_nothing_is_added(self, llm, client):
        llm.chat(list(self.MESSAGES), PARAMS)
        expected = llm.get_tokenizer().encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False)
        assert client.requests[0].prompt_token_ids.tolist() == expected

    def test_begin_of_text_is_not_doubled(self, llm, client):
        llm.chat(list(self.MESSAGES), PARAMS, chat_template="<s>{{ messages[0].content }}")
        assert client.requests[0].prompt_token_ids.tolist() == llm.get_tokenizer().encode("hi")

    def test_many_conversations(self, llm):
        conversations = [[{"role": "user", "content": text}] for text in TEXTS]
        outputs = llm.chat(conversations, PARAMS, chat_template="{{ messages[0].content }}")
        assert texts(outputs) == TEXTS

    def test_a_wrong_conversation_is_refused_before_anything_runs(self, llm, client):
        with pytest.raises(ValidationError):
            llm.chat([list(self.MESSAGES), [{"role": "user", "content": 3}]], PARAMS)
        assert not client.requests

    def test_continuing_the_last_message(self, llm, client):
        messages = [*self.MESSAGES, {"role": "assistant", "content": "Once"}]
        llm.chat(messages, PARAMS, add_generation_prompt=False, continue_final_message=True)
        text = llm.get_tokenizer().decode(client.requests[0].prompt_token_ids.tolist(), skip_special_tokens=False)
        assert text.endswith("<|im_start|>assistant\nOnce")

    def test_without_a_template_chat_says_what_to_do(self, llm):
        llm.llm_engine.chat_template = None
        with pytest.raises(ChatTemplateError, match=r"no chat template\nhint: pass one"):
            llm.chat(list(self.MESSAGES), PARAMS)

    @pytest.mark.parametrize("messages", ["hi", {"role": "user"}, 3], ids=repr)
    def test_what_is_no_conversation_is_refused(self, llm, messages):
        with pytest.raises(ValidationError, match="messages"):
            llm.chat(messages, PARAMS)


def test_the_prefix_cache_can_be_reset(llm):
    assert llm.reset_prefix_cache() is True
    assert llm.reset_prefix_cache(reset_running_requests=True) is True
    with pytest.raises(UnsupportedError, match="reset_connector"):
        llm.reset_prefix_cache(reset_connector=True)


def test_the_context_manager_shuts_down(client):
    with LLM.from_engine(make_engine(client)):
        pass
    assert client.is_shut_down


def test_unknown_settings_name_the_nearest():
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM("leaf", max_model_lenn=3)


def test_an_answer_may_be_empty(llm, client):
    client.answer = lambda request: [EOS]
    (output,) = llm.generate("fox", PARAMS)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "stop")
