"""Random context-free grammars, written as EBNF and as Lark, and an independent judge of what they allow."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

Node = tuple[Any, ...]
"""("text", str), ("class", chars), ("sequence" or "choice", nodes), ("rule", name) or ("repeat", node, low, high)."""

LETTERS = "abcxyz01"


@dataclass(frozen=True, slots=True)
class RandomGrammar:
    """Rules by name; the first is the start."""

    rules: dict[str, Node]

    def ebnf(self) -> str:
        """As xgrammar reads it."""
        names = {name: "root" if not index else name for index, name in enumerate(self.rules)}
        return "\n".join(f"{names[name]} ::= {_shown(node, names)}" for name, node in self.rules.items())

    def lark(self) -> str:
        """As llguidance reads it."""
        names = {name: "start" if not index else name for index, name in enumerate(self.rules)}
        return "\n".join(f"{names[name]}: {_shown(node, names, is_lark=True)}" for name, node in self.rules.items())

    def accepts(self, text: str) -> bool:
        """Whether the start derives the whole of `text`."""
        first = next(iter(self.rules))
        return len(text) in _Judge(self.rules, text).ends(("rule", first), 0)


def random_grammar(rng: random.Random) -> RandomGrammar:
    """One to five rules; each refers to later ones, and some to themselves behind a bracket."""
    count = rng.randint(1, 5)
    names = [f"r{index}" for index in range(count)]
    rules = {name: _random_node(rng, names[index + 1 :], 2) for index, name in enumerate(names)}
    if rng.random() < 0.5:
        own = rng.choice(names)
        inner = ("repeat", ("rule", own), 0, 1)
        rules[own] = ("choice", (rules[own], ("sequence", (("text", "("), inner, ("text", ")")))))
    return RandomGrammar(rules)


def _random_node(rng: random.Random, later: list[str], depth: int) -> Node:
    kind = rng.randrange(6 if depth else 2)
    if kind == 0:
        return ("text", "".join(rng.choices(LETTERS + ' "\\é', k=rng.randint(1, 3))))
    if kind == 1:
        return ("rule", rng.choice(later)) if later else ("class", "".join(rng.sample(LETTERS, rng.randint(1, 4))))
    if kind in (2, 3):
        return ("sequence", tuple(_random_node(rng, later, depth - 1) for _ in range(rng.randint(1, 3))))
    if kind == 4:
        return ("choice", tuple(_random_node(rng, later, depth - 1) for _ in range(rng.randint(1, 3))))
    low = rng.randrange(3)
    return ("repeat", _random_node(rng, later, depth - 1), low, low + rng.randint(1, 2))


def _shown(node: Node, names: dict[str, str], is_lark: bool = False) -> str:
    kind = node[0]
    if kind == "text":
        return '"' + node[1].replace("\\", "\\\\").replace('"', '\\"') + '"'
    if kind == "class":
        return f"/[{node[1]}]/" if is_lark else f"[{node[1]}]"
    if kind == "rule":
        return names[node[1]]
    if kind == "repeat":
        return f"({_shown(node[1], names, is_lark)}){{{node[2]},{node[3]}}}"
    between = " " if kind == "sequence" else " | "
    return "(" + between.join(_shown(one, names, is_lark) for one in node[1]) + ")"


class _Judge:
    """Where each node may end, by the definition; no rule refers to itself before it has read a character."""

    def __init__(self, rules: dict[str, Node], text: str) -> None:
        self._rules = rules
        self._text = text
        self._known: dict[tuple[Node, int], frozenset[int]] = {}

    def ends(self, node: Node, start: int) -> frozenset[int]:
        """The ends of what `node` may derive from `start` on."""
        key = (node, start)
        if key not in self._known:
            self._known[key] = self._ends(node, start)
        return self._known[key]

    def _ends(self, node: Node, start: int) -> frozenset[int]:
        kind = node[0]
        if kind == "text":
            return frozenset([start + len(node[1])] if self._text.startswith(node[1], start) else [])
        if kind == "class":
            return frozenset([start + 1] if self._text[start : start + 1] in list(node[1]) else [])
        if kind == "rule":
            return self.ends(self._rules[node[1]], start)
        if kind == "choice":
            return frozenset().union(*(self.ends(one, start) for one in node[1]))
        if kind == "sequence":
            return self._chain(node[1], start)
        found = self._chain((node[1],) * node[2], start)
        reached = found
        for _ in range(node[3] - node[2]):
            reached = frozenset().union(*(self.ends(node[1], at) for at in reached))
            found |= reached
        return found

    def _chain(self, nodes: tuple[Node, ...], start: int) -> frozenset[int]:
        reached = frozenset([start])
        for one in nodes:
            reached = frozenset().union(*(self.ends(one, at) for at in reached))
        return reached
