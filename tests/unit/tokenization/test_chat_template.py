"""Rendering conversations: the same text as transformers', and the options around it."""

from __future__ import annotations

import json

import pytest

from quire.errors import ChatTemplateError, UnsupportedError, ValidationError
from quire.tokenization.chat_template import ChatTemplate, load_chat_template
from quire.tokenization.tokenizer import load_tokenizer
from tests.models.checkpoints import CHAT_TEMPLATE, make_tokenizer
from tests.unit.tokenization.vocabularies import SPECIAL, write_fast

LLAMA_LIKE = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if tools is not none %}
    {{- "Functions:\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '[' + message['role'] + ']\n' + message['content'] | trim + '\n' }}
    {%- elif 'tool_calls' in message %}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", ' }}{{- call.function.arguments | tojson }}
        {%- endfor %}
    {%- else %}
        {{- message.content | tojson }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\n' }}
{%- endif %}
"""
QWEN_LIKE = """
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set is_text = message.content is string and not(message.content.startswith('<r>')) %}
    {%- if ns.multi_step_tool and message.role == "user" and is_text %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {% generation %}
            {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ loop.index0 ~ (reasoning | length) }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
TEMPLATES = {"chatml": CHAT_TEMPLATE, "llama-like": LLAMA_LIKE, "qwen-like": QWEN_LIKE}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}]
CONVERSATIONS = {
    "one question": [{"role": "user", "content": " Hello <b> & 'you' "}],
    "a system prompt": [{"role": "system", "content": " Be kind. "}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"},
        {"role": "user", "content": "3\n"},
    ],
}
TOOL_TURNS = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": "sunny"},
]


def transformers_text(template, messages, **options):
    tokenizer = make_tokenizer()
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)


@pytest.mark.parametrize("with_tools", [False, True], ids=["no-tools", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_text_equals_transformers(source, messages, add_generation_prompt, with_tools):
    tools = TOOLS if with_tools else None
    expected = transformers_text(source, messages, add_generation_prompt=add_generation_prompt, tools=tools)
    template = ChatTemplate(source, SPECIAL)
    assert template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools) == expected


def test_tool_calls_equal_transformers_even_with_arguments_as_text():
    expected = transformers_text(LLAMA_LIKE, TOOL_TURNS)
    template = ChatTemplate(LLAMA_LIKE, SPECIAL)
    assert template.render(TOOL_TURNS, add_generation_prompt=False) == expected
    as_text = json.loads(json.dumps(TOOL_TURNS))
    as_text[1]["tool_calls"][0]["function"]["arguments"] = '{"city": "Köln"}'
    assert template.render(as_text, add_generation_prompt=False) == expected


def test_template_variables_of_the_caller():
    template = ChatTemplate(QWEN_LIKE)
    messages = CONVERSATIONS["one question"]
    assert template.render(messages, template_kwargs={"enable_thinking": False}).endswith("</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_template_variables_cannot_replace_arguments(name):
    with pytest.raises(ChatTemplateError, match=f"cannot set {name}"):
        ChatTemplate(CHAT_TEMPLATE).render(CONVERSATIONS["turns"], template_kwargs={name: 1})


def test_objects_do_not_reach_the_template():
    with pytest.raises(ChatTemplateError, match="is a object"):
        ChatTemplate(CHAT_TEMPLATE).render(CONVERSATIONS["turns"], template_kwargs={"x": object()})


@pytest.mark.parametrize("content", ["Once upon", "Once upon  ", "a </s> b"])
def test_the_last_message_is_left_open(content):
    messages = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": content}]
    text = ChatTemplate(CHAT_TEMPLATE).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|im_start|>user\nTell<|im_end|>\n<|im_start|>assistant\n{content}"


def test_opening_and_continuing_exclude_each_other():
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        ChatTemplate(CHAT_TEMPLATE).render(CONVERSATIONS["turns"], continue_final_message=True)


def test_a_template_that_does_not_write_the_last_message_cannot_continue_it():
    with pytest.raises(ChatTemplateError, match="cannot be continued"):
        ChatTemplate("x").render(CONVERSATIONS["turns"], add_generation_prompt=False, continue_final_message=True)


PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}|{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content_format", "text"),
    [
        (CHAT_TEMPLATE, "auto", "<|im_start|>user\na\nb<|im_end|>\n"),
        (CHAT_TEMPLATE, "string", "<|im_start|>user\na\nb<|im_end|>\n"),
        (PARTS, "auto", "a\nb|"),
        (PARTS, "openai", "a\nb|"),
    ],
    ids=["text", "forced text", "parts", "forced parts"],
)
def test_content_parts_take_the_form_that_the_template_reads(source, content_format, text):
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate(source)
    messages = [{"role": "user", "content": content}]
    assert template.render(messages, add_generation_prompt=False, content_format=content_format) == text


def test_the_refusal_of_a_template_reaches_the_caller():
    with pytest.raises(ChatTemplateError, match="refused the messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(CONVERSATIONS["turns"])


def test_a_failing_template_is_the_callers_error():
    with pytest.raises(ChatTemplateError, match="UndefinedError"):
        ChatTemplate("{{ nothing.at.all }}").render(CONVERSATIONS["turns"])


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "no role"}], [{"role": 3, "content": "x"}], [1]])
def test_malformed_messages_are_refused(messages):
    with pytest.raises(ValidationError):
        ChatTemplate(CHAT_TEMPLATE).render(messages)


def test_images_are_refused_by_name():
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    with pytest.raises(UnsupportedError, match="image_url"):
        ChatTemplate(CHAT_TEMPLATE).render(messages)


def test_the_date_is_offered():
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(CONVERSATIONS["turns"])) == 10


class TestFinding:
    def directory(self, tmp_path, chat_template=None, jinja=None):
        write_fast(tmp_path, {**SPECIAL, **({"chat_template": chat_template} if chat_template else {})})
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja)
        return load_tokenizer(tmp_path)

    def test_none(self, tmp_path):
        assert load_chat_template(self.directory(tmp_path)) is None

    def test_in_the_configuration(self, tmp_path):
        assert load_chat_template(self.directory(tmp_path, "A")).source == "A"

    def test_a_file_of_its_own_goes_first(self, tmp_path):
        assert load_chat_template(self.directory(tmp_path, "A", "B")).source == "B"

    def test_the_users_choice_goes_before_both(self, tmp_path):
        tokenizer = self.directory(tmp_path, "A", "B")
        assert load_chat_template(tokenizer, "{{ 'C' }}").source == "{{ 'C' }}"
        (tmp_path / "mine.jinja").write_text("D")
        assert load_chat_template(tokenizer, str(tmp_path / "mine.jinja")).source == "D"

    def test_named_templates(self, tmp_path):
        named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "T"}]
        tokenizer = self.directory(tmp_path, named)
        assert load_chat_template(tokenizer).source == "A"
        assert load_chat_template(tokenizer).with_tools.source == "T"

    def test_special_tokens_are_visible(self, tmp_path):
        template = load_chat_template(self.directory(tmp_path, "{{ bos_token }}|{{ eos_token }}"))
        assert template.render(CONVERSATIONS["turns"]) == "<s>|</s>"

    def test_a_path_that_does_not_exist_is_refused(self, tmp_path):
        with pytest.raises(ChatTemplateError, match="neither an existing file nor Jinja"):
            load_chat_template(self.directory(tmp_path), "nowhere.jinja")

    def test_a_template_of_a_wrong_type_is_refused(self, tmp_path):
        with pytest.raises(ChatTemplateError, match="is a dict"):
            load_chat_template(self.directory(tmp_path, {"a": 1}))
