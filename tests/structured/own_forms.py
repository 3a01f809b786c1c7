r"""Patterns and grammars of our own, each held in both directions against an independent judge: `re` and `lark`.

Texts are written by chance within each grammar's masks, and by chance beside them; the library must allow exactly what
the judge allows. `tests.structured.corpus` runs it long, `test_own_forms` short.
"""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import ValidationError
from quire.structured_output.choose import honouring
from quire.structured_output.interface import CompiledGrammar, GrammarError
from quire.structured_output.spec import spec_of
from tests.structured.libraries import BYTES, accepts, backend
from tests.structured.walks import text_of, walk

MAX_TOKENS = 48
PATTERNS = r"""
abc|abd|x|a*|a+b?|(?:ab)+|(ab|cd){2}|[a-f]{3}|[^a-f]{1,2}|[\^a]+|[\^]|[\^+*/-]|[a^]|[^^]|[^\^a]{2}|[Z-a]|[+--]|[&~]+|[a&&b]
[[a]+|[\]\[]|[a\-z]|[-a]|[a-]|\d+|\w{1,4}|\s?x|\D|\W{1,2}|\S{2}|[\d.]+|[^\d]|[^\W\d_]{1,6}|[^\D]+|[^\S]|[^\W]|[\W]|[\D5]|[\Sx]
.|.{2,3}|a.c|\.|\*\+\?|\(\)|\[\]|\{\}|a{2}|a{2,}|a{,2}b|a{2,3}|a{0}b|a{x}|{a}|x{,2}y|a{}|a{1,b}|}|a}|(a|b|)c|(|a)b|((a)(b))?
\x41|\u0042|\t|\n|[\t\n]|\x00?|\\|\\\\|"|"[^"]*"|'[a-z]'|a+?b|a??b|a*?|(?:a{1,2}){2}|(a*)*b|(?:a|aa)+|(a?){3}|0|[1-9]\d{0,2}
-?(0|[1-9]\d*)(\.\d+)?|(25[0-5]|2[0-4]\d|1?\d?\d)|[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){2}|[A-Z]{2}\d{2}|(Mon|Tue|Wed)|#[0-9a-f]{3}
é|[é-ü]|[^é]|日本?|[ぁ-ん]{1,2}|😀|[😀-😂]|[^😀]|ß+|\w+@\w+\.(com|org)|[a-z]+(-[a-z]+)*|v\d+(\.\d+){2}|(a|b)*abb|(0|1(01*0)*1)+
^abc$|^a|b$|^(a|b)$|\$\^|a\$|[$^]|[.]|[*]|[\w.-]+|[\w-]|[^\w-]|/[a-z/]*|(yes|no)!?|(a(b(c)?)?)?|x(y|z){0,2}x|[a-c-]|\-|\/|\#
""".strip()  # one after another, by the bar at depth 0 and by lines; see `patterns`
SPLIT_BY_LINES = [
    r"\d{3}-\d{4}|none", r"a|b|c", r"(?:a|b)|c", r"|a", r"a|", r"[|]", r"a\|b", r"abc|", r"foo|foobar|bar",
    r"(?:x|)(?:y|)", r"[a-z]{2}|\d{2}",
]  # fmt: skip

# The same language as EBNF and as Lark; Lark is the judge of both.
GRAMMARS: list[tuple[str, str]] = [
    ('root ::= "a"', 'start: "a"'),
    ('root ::= "a" | "bc"', 'start: "a" | "bc"'),
    ('root ::= "a" "b"? "c"', 'start: "a" "b"? "c"'),
    ('root ::= "x"+', 'start: "x"+'),
    ('root ::= "x"* "y"', 'start: "x"* "y"'),
    ('root ::= ("ab" | "c")+', 'start: ("ab" | "c")+'),
    ("root ::= [a-c] [0-9]", "start: /[a-c]/ /[0-9]/"),
    ("root ::= [^a-z\\n]", "start: /[^a-z\\n]/"),
    ('root ::= "(" root ")" | "x"', 'start: "(" start ")" | "x"'),
    ('root ::= "[" (root ("," root)*)? "]"', 'start: "[" (start ("," start)*)? "]"'),
    ('root ::= s s\ns ::= "a" s "b" | "c"', 'start: s s\ns: "a" s "b" | "c"'),
    ('root ::= e\ne ::= t ("+" t)*\nt ::= [0-9] | "(" e ")"', 'start: e\ne: t ("+" t)*\nt: /[0-9]/ | "(" e ")"'),
    ('root ::= e\ne ::= e "-" t | t\nt ::= "1"', 'start: e\ne: e "-" t | t\nt: "1"'),
    ('root ::= "\\"" [a-z]* "\\""', 'start: "\\"" /[a-z]/* "\\""'),
    ('root ::= "\\\\" "n"', 'start: "\\\\" "n"'),
    ('root ::= "é" | "日本"', 'start: "é" | "日本"'),
    ("root ::= [é-ü]+", "start: /[é-ü]/+"),
    ('root ::= p | q\np ::= "a" q?\nq ::= "b" p?', 'start: p | q\np: "a" q?\nq: "b" p?'),
    ('root ::= "a" root "a" | "b" root "b" | "c"', 'start: "a" start "a" | "b" start "b" | "c"'),
    ('root ::= "if " c " then " c\nc ::= "x" | "y"', 'start: "if " c " then " c\nc: "x" | "y"'),
    ('root ::= k "=" v (";" k "=" v)*\nk ::= [a-z]\nv ::= [0-9]',
     'start: k "=" v (";" k "=" v)*\nk: /[a-z]/\nv: /[0-9]/'),
    ('root ::= "<" n ">" root* "</>" | "-"\nn ::= [ab]', 'start: "<" n ">" start* "</>" | "-"\nn: /[ab]/'),
    ('root ::= ("a" | "b") ("c" | "d")?', 'start: ("a" | "b") ("c" | "d")?'),
    ('root ::= "a"? "b"? "c"?', 'start: "a"? "b"? "c"?'),
    ("root ::= [-+]? [0-9]+", "start: /[-+]/? /[0-9]/+"),
    ("root ::= [\\]\\[]+", "start: /[\\]\\[]/+"),
]  # fmt: skip


def patterns() -> list[str]:
    """Every pattern, once."""
    found = [one for line in PATTERNS.splitlines() for one in _alternatives(line)]
    return list(dict.fromkeys([*found, *SPLIT_BY_LINES]))


def _alternatives(line: str) -> Iterator[str]:
    """The parts of a line between the bars that stand in no group."""
    part, depth, in_class, at = "", 0, False, 0
    while at < len(line):
        size = 2 if line[at] == "\\" else 1
        char = line[at : at + size]
        at += size
        if char == "|" and not depth and not in_class:
            yield part
            part = ""
            continue
        if not in_class:
            depth += (char == "(") - (char == ")")
        in_class = char != "]" if in_class else char == "["
        part += char
    yield part


def grammar_of(**asked: Any) -> CompiledGrammar | None:
    """The grammar that `auto` makes of it; None when it is refused."""
    params = StructuredOutputsParams(**asked)
    try:
        for one in honouring(params, StructuredOutputsConfig()):
            spec = spec_of(one)
            try:
                return backend(spec.backend).load(spec, backend(spec.backend).compile(spec))
            except GrammarError:
                continue
    except ValidationError:
        pass
    return None


def forms() -> Iterator[tuple[str, CompiledGrammar | None, Callable[[str], bool]]]:
    """(what it is, its grammar, its judge)."""
    for pattern in patterns():
        yield pattern, grammar_of(regex=pattern), _regex_judge(pattern)
    for ebnf, text in GRAMMARS:
        judge = _lark_judge(text)
        yield ebnf, grammar_of(grammar=ebnf), judge
        yield text, grammar_of(grammar=text), judge


def _regex_judge(pattern: str) -> Callable[[str], bool]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # sets that Python may read otherwise one day
        compiled = re.compile(pattern, re.ASCII)
    return lambda text: compiled.fullmatch(text) is not None


def _lark_judge(text: str) -> Callable[[str], bool]:
    import lark

    parser = lark.Lark(text, parser="earley", lexer="dynamic_complete")

    def judge(one: str) -> bool:
        try:
            parser.parse(one)
        except lark.exceptions.LarkError:
            return False
        return True

    return judge


def differences(num_walks: int, seed: int = 0) -> tuple[int, list[str], list[str]]:
    """How many forms are accepted; those that are not; texts on which library and judge differ, and what it says."""
    rng = random.Random(seed)
    num_accepted, refused, wrong = 0, [], []
    for name, grammar, judge in forms():
        if grammar is None:
            refused.append(name)
            continue
        num_accepted += 1
        for text in {"", "a", "^", "é", "5", "_", " ", "\n", *_texts(grammar, rng, num_walks)}:
            is_allowed = accepts(grammar, text)
            wrong += [f"{name!r}: {text!r}, {is_allowed}"] if is_allowed != judge(text) else []
    return num_accepted, refused, wrong


def _texts(grammar: CompiledGrammar, rng: random.Random, num_walks: int) -> Iterator[str]:
    """Texts within the grammar, and with a character less, more or changed."""
    for _ in range(num_walks):
        tokens = walk(grammar, BYTES, rng, MAX_TOKENS)
        if tokens is None:
            continue
        text = text_of(tokens, BYTES)
        yield text
        at = rng.randrange(len(text) + 1)
        char = rng.choice([*text, *"ab0^-é \n\"'(]"])
        yield from (text[:at] + text[at + 1 :], text[:at] + char + text[at:], text[:at] + char + text[at + 1 :])
