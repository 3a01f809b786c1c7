"""Words that users and readers do not meet: the field's term or plain English stands in their place.

The glossary is in ARCHITECTURE.md. What an entry forbids, a reader stumbles over, or it is a second word for one thing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What is not written -> what is written in its place.
NOWHERE = {
    r"\bdear (ones|grammars?|to)\b": "expensive",
    r"\bhindrance": "blocking reason",
    r"\b(is_)?laxer\b": "of lower priority",
    r"\bwhoever\b": "the thing that does it",
    r"\bnobody\b": "no request, no client, none",
    r"\bhears?\b": "is notified of, is sent",
    r"\b(is|are|was|were|be|been) told\b": "is sent, returned or reported",
    r"\bturning points?\b": "lifecycle event",
    r"\blet_go\b": "unpin",
    r"\b(accuse|culprit)\b": "report_failure, faulty",
    r"\bpage_(copies|demand|transfers)\b": "block_...",
    r"\bsigns of life\b": "heartbeat",
}
IN_MESSAGES = {
    **NOWHERE,
    r"(?<!there) is no (?!longer|more)": '"is not a valid ..."',
    r"\b(a|list of|stop) texts?\b(?! file)": "string",
    r"\b(told|tells?)\b(?! me)": "returned, reported or sent",
    r"\b(hears?|whoever|nobody|laxer|stricter)\b": "the thing that does it, or the term",
    r"\bbeside\b": "with, next to, or in addition to",
    r"\bdear\b": "expensive",
    r"\bgo(es)? on\b": "continue, resume",
    r"\b(KV cache|full|free|of|more|fewer|no) pages\b|\bpages of \{": "block",
    r"\bin the making\b": "compiling",
    r"\bunder way\b": "running",
    r"\bwait for (its|their|a) turn\b": "waiting",
    r"\bcannot be had\b": "cannot be allocated",
    r"\bunforeseen\b": "internal error",
    r"\bform of (a|the) answer\b": "structured output, grammar",
    r"\bknown but not supported\b": "a vLLM option that Quire does not implement yet",
    r"\bmost (requests|tokens|new tokens)\b": "maximum number of",
}
IN_DOCS = {
    **NOWHERE,
    r"\b(hears?|whoever|nobody|laxer)\b": "the thing that does it, or the term",
    r"\bis told\b|\bare told\b": "is sent, returned or reported",
    r"\bunder way\b": "running",
    r"\bbegin alike\b": "have a common prefix",
    r"\bis no (?!longer|more)(request|object|file|address|number)\b": '"is not a valid ..."',
    r"\b(in|of) the making\b": "compiling",
    r"\bearns nothing\b": "does not accumulate credit",
    r"\bkeeps the walls\b": "enforces the layering rules",
}


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """String literals of a module with their lines, without docstrings; what an f-string inserts is left out."""
    skipped = set()
    for node in ast.walk(tree):
        for child in getattr(node, "body", None) or () if not isinstance(node, ast.Lambda | ast.IfExp) else ():
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                skipped.add(id(child.value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(id(value) for value in node.values)
            parts = [one.value if isinstance(one, ast.Constant) else "{}" for one in node.values]
            yield node.lineno, "".join(map(str, parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value


def found(text: str, words: dict[str, str], where: str) -> list[str]:
    return [
        f'{where}: "{hit[0]}" -> {instead}'
        for pattern, instead in words.items()
        for hit in [re.search(pattern, text, re.IGNORECASE)]
        if hit
    ]


def test_messages_use_the_terms_of_the_field():
    wrong: list[str] = []
    anything = re.compile("|".join(f"(?:{one})" for one in IN_MESSAGES), re.IGNORECASE)
    for path in sorted((ROOT / "quire").rglob("*.py")):
        for line, text in messages(ast.parse(path.read_text())):
            if " " in text and anything.search(text):
                wrong += found(text, IN_MESSAGES, f"{path.relative_to(ROOT)}:{line}")
    assert not wrong, "write what stands right of the arrow:\n" + "\n".join(wrong)


def test_code_and_comments_do_not_bring_back_what_has_a_term():
    wrong = []
    anything = re.compile("|".join(f"(?:{one})" for one in NOWHERE), re.IGNORECASE)
    for path in sorted((ROOT / "quire").rglob("*.py")):
        text = path.read_text()
        if anything.search(text):
            for number, line in enumerate(text.splitlines(), 1):
                wrong += found(line, NOWHERE, f"{path.relative_to(ROOT)}:{number}")
    assert not wrong, "write what stands right of the arrow:\n" + "\n".join(wrong)


def test_pages_for_users_use_the_terms_of_the_field():
    wrong = []
    pages = [
        ROOT / "README.md",
        ROOT / "ARCHITECTURE.md",
        *(ROOT / "docs/how-to").glob("*.md"),
        *(ROOT / "docs/explanation").glob("*.md"),
    ]
    for path in sorted(pages):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            wrong += found(line, IN_DOCS, f"{path.relative_to(ROOT)}:{number}")
    assert not wrong, "write what stands right of the arrow:\n" + "\n".join(wrong)
