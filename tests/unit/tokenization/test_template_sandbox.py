"""Hostile chat templates: every one is refused, quickly and within little memory, and none reaches the interpreter."""

from __future__ import annotations

import sys
import time

import pytest

from quire.errors import ChatTemplateError
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.template_budget import TemplateLimits

MESSAGES = [{"role": "user", "content": "hi"}]
MAX_CPU_S = 20.0  # generous: on a quiet machine the slowest takes about one
DOUBLE = "{%% set ns = namespace(x=%s, y=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ ns.x }}"


def doubling(step: str, start: str = "['a']") -> str:
    return DOUBLE % (start, start, step)


TOO_EXPENSIVE = {
    "empty nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "branching macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "endless output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "text times number": "{{ 'a' * 10**9 }}",
    "number times list": "{{ 10**9 * [1] }}",
    "joined text": doubling("{% set ns.x = ns.x ~ ns.x %}", "'a'"),
    "added text": doubling("{% set ns.x = ns.x + ns.x %}", "'a'"),
    "added list": doubling("{% set ns.x = ns.x + ns.x %}"),
    "nested list": doubling("{% set ns.x = [ns.x, ns.x] %}"),
    "nested tuple as key": doubling("{% set ns.x = (ns.x, ns.x) %}{% set ns.y = {ns.x: 1} %}", "('a',)"),
    "nested mapping views": doubling("{% set ns.x = {'a': ns.x.items(), 'b': ns.x.items()} %}", "{'k': 1}"),
    "nested dict calls": doubling("{% set ns.x = dict(a=ns.x, b=ns.x) %}", "dict(a=1)"),
    "nested defaults": doubling("{% set ns.x = [none, none] | map('default', ns.x, true) | list %}"),
    "compared lists": doubling(
        "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% if ns.x == ns.y %}{% endif %}"
    ),
    "captured text": doubling("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}", "'a'"),
    "filtered block": doubling(
        "{% set ns.x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}", "'a'"
    ),
    "keyword arguments": "{% macro f(n) %}{% if n %}{{ f(n-1, a=kwargs, b=kwargs) }}{% else %}{{ kwargs }}{% endif %}"
    "{% endmacro %}{{ f(50) }}",
    "variable arguments": "{% macro f() %}{{ f(varargs, varargs) }}{% endmacro %}{{ f() }}",
    "power": "{{ 10 ** 100000 }}",
    "squares": doubling("{% set ns.x = ns.x * ns.x %}", "3"),
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent computed width": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:>1000000000}'.format(1) }}",
    "format computed width": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace method": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "join filter": "{{ range(100000) | list | join('b' * 100000) }}",
    "join method": "{{ ('b' * 100000).join(range(100000) | map('string')) }}",
    "lazy growth": "{{ range(100000) | map('replace', '1', 'b' * 100000) | join }}",
    "indent filter": "{{ 'a' | indent(1000000000) }}",
    "indented json": "{{ messages | tojson(indent=1000000000) }}",
    "split": "{{ ('a ' * 4000000).split() }}",
    "date format": "{{ strftime_now('%Y' * 1000000) }}",
}
NOT_THERE = {
    "class of a text": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class through attr": "{{ ''|attr('__class__') }}",
    "globals of a function": "{{ raise_exception.__globals__['sys'] }}",
    "globals of a class": "{{ namespace.__init__.__globals__ }}",
    "the template itself": "{{ self.__init__.__globals__ }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "list mutation": "{{ messages.append(1) }}",
    "dict mutation": "{{ messages[0].update(role='system') }}",
    "padding": "{{ 'a'.ljust(1000000000) }}",
    "bytes of a number": "{{ (1).to_bytes(1000000000, 'big') }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "extends": "{% extends '/etc/passwd' %}",
    "lipsum": "{{ lipsum(n=100000000) }}",
    "cycler": "{{ cycler('a') }}",
}
DOES_NOT_COMPILE = {
    "unknown filter": "{{ 'a' | center(1000000000) }}",
    "unclosed": "{% for a in b %}",
    "deep parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep loops": "{% for a in x %}" * 50 + "{% endfor %}" * 50,
    "too long": "x" * (300 << 10),
}
HARMLESS = {
    "a class is undefined": ("{{ messages.__class__ }}", ""),
    "a class through format": ("{{ '{0.__class__}'.format(1) }}", ""),
    "a class through map": ("{{ [messages] | map(attribute='__class__') | list }}", "[Undefined]"),
    "a namespace has no content": ("{% set n = namespace(a='x') %}{{ n }}{{ [n] }}", "<namespace>[<namespace>]"),
    "small powers": ("{{ 2 ** 10 }}", "1024"),
}


@pytest.mark.parametrize("source", TOO_EXPENSIVE.values(), ids=TOO_EXPENSIVE)
def test_too_much_work_is_refused(source):
    start = time.process_time()
    with pytest.raises(ChatTemplateError, match=r"the chat template .*\nhint: use a simpler template"):
        ChatTemplate(source).render(MESSAGES)
    assert time.process_time() - start < MAX_CPU_S


@pytest.mark.parametrize("source", [*TOO_EXPENSIVE.values()][:6], ids=[*TOO_EXPENSIVE][:6])
def test_the_probe_at_the_start_refuses_it_too(source):
    with pytest.raises(ChatTemplateError, match="use a simpler template"):
        ChatTemplate(source).probe()


def test_the_probe_refuses_a_reach_for_the_interpreter():
    with pytest.raises(ChatTemplateError, match="not safe"):
        ChatTemplate(NOT_THERE["class of a text"]).probe()


def test_the_probe_accepts_a_template_that_refuses_its_conversation():
    ChatTemplate("{{ raise_exception('a system message must come first') }}").probe()


@pytest.mark.parametrize("source", NOT_THERE.values(), ids=NOT_THERE)
def test_what_is_not_offered_cannot_be_had(source):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("source", DOES_NOT_COMPILE.values(), ids=DOES_NOT_COMPILE)
def test_malformed_sources_are_refused(source):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source)


@pytest.mark.parametrize(("source", "text"), HARMLESS.values(), ids=HARMLESS)
def test_harmless_look_alikes_are_rendered(source, text):
    assert ChatTemplate(source).render(MESSAGES) == text


def test_the_deadline_holds_when_lines_are_cheap():
    limits = TemplateLimits(max_cpu_s=0.05, max_events=10**12)
    with pytest.raises(ChatTemplateError, match=r"longer than 0.05 seconds"):
        ChatTemplate(TOO_EXPENSIVE["empty nested loops"], limits=limits).render(MESSAGES)


def test_the_trace_hook_is_put_back():
    before = sys.gettrace()
    template = ChatTemplate("{{ messages[0].content }}")
    template.render(MESSAGES)
    with pytest.raises(ChatTemplateError):
        ChatTemplate(TOO_EXPENSIVE["text times number"]).render(MESSAGES)
    assert sys.gettrace() is before


def test_a_template_works_again_after_it_was_stopped():
    template = ChatTemplate("{% if messages | length > 1 %}{{ 'a' * 10**9 }}{% endif %}ok")
    with pytest.raises(ChatTemplateError):
        template.render(MESSAGES * 2)
    assert template.render(MESSAGES) == "ok"


def test_the_messages_of_the_caller_are_not_changed_or_shared():
    messages = [{"role": "user", "content": "hi"}]
    ChatTemplate("{{ messages | tojson }}").render(messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_long_conversations_are_within_the_limits():
    source = (
        "{% set ns = namespace(kept=[]) %}{% for m in messages %}{% set ns.kept = ns.kept + [m] %}{% endfor %}"
        "{% for m in ns.kept %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 60}] * 1000
    assert ChatTemplate(source).render(messages).count("<user>") == 1000
