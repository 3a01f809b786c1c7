"""Thinking: where it begins and ends, in any cut, before calls, and its tokens counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.parsers.answer import ParserChain, ReasoningCount
from quire.parsers.base import AnswerParser
from quire.parsers.harmony import HarmonyParser
from quire.parsers.reasoning.append_think import AppendThinkParser
from quire.parsers.reasoning.tags import TagParser
from quire.parsers.registry import REASONING_PARSERS
from quire.parsers.tool_calls.hermes import HermesParser
from tests.unit.parsers.catalogue import CALLS, PLAIN, hermes
from tests.unit.parsers.folding import TOOLS, Answer, check_splits, read

TEXTS = (
    "Hm.", "  two\n\nlines \n", "", "a < b </thin", "<think> again", '<tool_call>{"name": "now"}</tool_call>',
    "日本語 🙂", "x" * 300, " " * 300,
)  # fmt: skip
THOUGHTS = {
    "think": [(f"<think>{text}</think>", text) for text in TEXTS],
    "qwen3": [(f"<think>\n{text}\n</think>\n\n", text) for text in (*TEXTS[:5], *TEXTS[6:], "in <tool_call> tags")],
    "deepseek_v3": [(f"<think>{text}</think>", text) for text in TEXTS],
    "kimi_k2": [(f"<think>{text}</think>", text) for text in TEXTS],
    "minimax_m2": [(f"{text}\n</think>\n\n", text) for text in TEXTS if not text.startswith("<think>")]
    + [("<think>Hm.</think>", "Hm.")],
    "seed_oss": [(f"<seed:think>{text}</seed:think>", text) for text in TEXTS],
    "mistral": [(f"[THINK]{text}[/THINK]", text) for text in TEXTS],
    "gemma4": [(f"<|channel>thought\n{text}<channel|>", text) for text in TEXTS],
    "ernie45": [(f"{text}\n</think>\n\n", text) for text in TEXTS if not text.startswith("<think>")]
    + [("<think>Hm.</think>", "Hm.")],
    "hunyuan_a13b": [(f"<think>\n{text}\n</think>\n", text) for text in TEXTS],
    "deepseek_r1": [(f"{text}\n</think>", text) for text in TEXTS if not text.startswith("<think>")]
    + [("<think>Hm.</think>", "Hm.")],
    "granite": [(f"Here is my thought process:{text}Here is my response:", text) for text in TEXTS[:4]]
    + [(f"Here's my thought process: {text} Here's my response:\n", text) for text in TEXTS],
    "openai": [
        (f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant<|channel|>final<|message|>", text)
        for text in TEXTS
    ],
}
REST = ["", "Four.", "Four. ", "</think>", "é\n\nand <think>more</think>"]


def make(name: str) -> AnswerParser:
    return HarmonyParser(TOOLS) if name == "openai" else REASONING_PARSERS[name]()


def answers(name: str) -> list[tuple[str, Answer]]:
    return [
        (thought + rest, Answer(content=rest.lstrip(), reasoning=text.strip(" \n")))
        for thought, text in THOUGHTS[name]
        for rest in REST
    ]


@pytest.mark.parametrize("name", THOUGHTS)
def test_thinking_is_apart_from_the_answer(name):
    cases = answers(name)
    assert len({text for text, _ in cases}) >= 40
    for text, meant in cases:
        assert read(make(name), [text]) == meant, text


@pytest.mark.parametrize("name", THOUGHTS)
def test_every_split_is_read_as_the_whole(name):
    check_splits(lambda: make(name), [text for text, _ in answers(name)] + PLAIN)


def test_every_parser_has_its_thoughts():
    assert {type(make(name)) for name in THOUGHTS} == {*REASONING_PARSERS.values(), HarmonyParser} - {AppendThinkParser}


@pytest.mark.parametrize("name", sorted({*THOUGHTS} - {"deepseek_r1", "minimax_m2", "ernie45"}))
def test_an_answer_without_thinking_is_content(name):
    for text in PLAIN:
        assert read(make(name), [text]) == Answer(content=text)


@pytest.mark.parametrize("name", ["deepseek_r1", "minimax_m2", "ernie45"])
def test_where_the_template_begins_the_thinking_an_answer_without_any_mark_is_thinking_that_was_cut(name):
    assert read(make(name), ["So far"]) == Answer(reasoning="So far")


CALLS_IN_THINKING = {
    "qwen3": ("<think>", '<tool_call>\n{"name": "now"}\n</tool_call>'),
    "mimo": ("<think>", "<tool_call><function=now></function></tool_call>"),
    "deepseek_v3": ("<think>", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now"),
    "deepseek_v4": ("<think>", "<｜DSML｜tool_calls>\n<｜DSML｜invoke"),
    "kimi_k2": ("<think>", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"),
    "minimax_m2": ("", "<minimax:tool_call>\n<invoke"),
    "seed_oss": ("<seed:think>", "<seed:tool_call>\n<function=now>"),
    "mistral": ("[THINK]", "[TOOL_CALLS]now[ARGS]{}"),
    "gemma4": ("<|channel>thought", "<|tool_call>call:now{}<tool_call|>"),
}


@pytest.mark.parametrize("name", CALLS_IN_THINKING)
def test_a_call_in_thinking_that_lacks_its_end_ends_it(name):
    start, call = CALLS_IN_THINKING[name]
    texts = [f"{start}\nI look.{space}{call}" for space in ("", "\n\n")]
    for text in texts:
        assert read(make(name), [text]) == Answer(call, "I look.")
    check_splits(lambda: make(name), texts)


def test_what_mentions_the_mark_of_a_call_is_thinking_and_so_is_a_call_where_a_grammar_waits_for_the_end():
    call = '<tool_call>{"name": "now"}'
    text = f"<think>the <tool_call> tag, {call}</think>Yes."
    assert read(make("qwen3"), [text]) == Answer(f"{call}</think>Yes.", "the <tool_call> tag,")
    parser = REASONING_PARSERS["qwen3"]()
    parser.waits_for_end = True
    assert read(parser, [text]) == Answer("Yes.", f"the <tool_call> tag, {call}")


def test_the_marks_around_an_answer_are_no_part_of_it():
    for name, tag in (("ernie45", "response"), ("hunyuan_a13b", "answer")):
        texts = [f"<think>a</think>\n\n<{tag}>\nYes.\n</{tag}>", f"<think>a</think><{tag}>Yes.", "<think>a</think>Yes."]
        for text in texts:
            assert read(make(name), [text]) == Answer("Yes.", "a")
        check_splits(lambda name=name: make(name), texts)
        call = '<tool_call>{"name": "now"}</tool_call>'
        assert read(make(name), [f"{texts[0]}\n\n{call}"]) == Answer("Yes." + call, "a")


def test_thinking_that_stays_in_the_answer_gets_the_mark_that_the_prompt_ended_with():
    parser = REASONING_PARSERS["minimax_m2_append_think"]
    for parts in (["Hm.</think>Yes."], list("Hm.</think>Yes.")):
        assert read(parser("<think>\n"), parts) == Answer("<think>Hm.</think>Yes.")
    assert read(parser("", "<think>H"), ["m."]) == Answer("m.")


@pytest.mark.parametrize("name", ["think", "deepseek_r1"])
def test_the_end_of_the_prompt_tells_how_the_answer_begins(name):
    parser = REASONING_PARSERS[name]
    assert read(parser("<|im_start|>assistant\n<think>\n"), ["Hm.</think>Yes."]) == Answer("Yes.", "Hm.")
    assert read(parser("<think>\n\n</think>\n\n"), ["Yes."]) == Answer("Yes.")
    asked = "what is <think>?<|im_end|>\n<|im_start|>assistant\n"
    assert read(parser(asked), ["Yes."]) == read(parser(), ["Yes."])


@pytest.mark.parametrize("name", ["think", "deepseek_r1"])
def test_an_answer_that_is_continued_goes_on_where_it_was(name):
    parser = REASONING_PARSERS[name]
    assert read(parser("", "<think>Long ago"), [" and far.</think>Yes."]) == Answer("Yes.", "and far.")
    assert read(parser("", "<think>Hm.</think>Y"), ["es."]) == Answer("es.")
    assert read(parser("", "Y"), ["es."]) == Answer("es.")


def test_calls_are_found_after_the_thinking_and_not_in_it():
    def chain() -> AnswerParser:
        return ParserChain(TagParser(), HermesParser(TOOLS))

    texts = [f"<think>{hermes(CALLS[1])}</think>\n{hermes(calls)} ok" for calls in CALLS[:6]]
    for text, calls in zip(texts, CALLS, strict=False):
        answer = read(chain(), [text])
        assert answer.reasoning == hermes(CALLS[1]) and answer.content == "ok"
        assert [name for name, _ in answer.calls] == [name for name, _ in calls]
    check_splits(chain, texts[:3])


@pytest.mark.parametrize("name", THOUGHTS)
def test_little_of_long_thinking_is_held_back(name):
    parser = make(name)
    text = THOUGHTS[name][0][0].partition("Hm.")[0] + "<think> </thin\n" * 5000
    told = 0
    for start in range(0, len(text), 50):
        told += sum(len(event.text) for event in parser.push(text[start : start + 50]))  # type: ignore[union-attr]
    assert told > len(text) - 200


class _Letters:
    """A tokenizer whose tokens are the marks and single characters."""

    MARKS = ("<think>", "</think>")
    special_ids: frozenset[int] = frozenset()
    table = None

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            mark = next((one for one in self.MARKS if text.startswith(one)), text[0])
            ids.append(self.MARKS.index(mark) if mark in self.MARKS else ord(mark))
            text = text[len(mark) :]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(self.MARKS[one] if one < 2 else chr(one) for one in ids)


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("think", "<think>\nHm.\n</think>Yes", 5), ("think", "Yes", 0), ("think", "<think>abc", 3),
        ("think", "<think></think>x", 0), ("deepseek_r1", "Hm.</think>Yes", 3), ("deepseek_r1", "abc", 3),
        ("deepseek_r1", "<think>Hm.</think>", 3),
    ],
)  # fmt: skip
def test_tokens_of_the_thinking_are_counted_without_its_marks(name: str, text: str, count: int) -> None:
    made: Callable[[], AnswerParser] = lambda: REASONING_PARSERS[name]()  # noqa: E731
    tokenizer = _Letters()
    ids = tokenizer.encode(text)
    whole = ReasoningCount(made(), tokenizer, [ord("x")])  # type: ignore[arg-type]
    whole.push(ids)
    single = ReasoningCount(made(), tokenizer, [ord("x")])  # type: ignore[arg-type]
    for one in ids:
        single.push([one])
    assert whole.num_tokens == single.num_tokens == count
