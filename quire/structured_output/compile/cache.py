"""GrammarCache: compiled grammars, and those that are compiling. Owned by the grammar manager.

Who asks for a grammar finds only what requests of the same salt have compiled, as with pages of the prefix cache: how
soon it is there says nothing of what other tenants ask for.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from concurrent.futures import Future
from typing import NamedTuple

from quire.structured_output.compile.errors import BudgetError
from quire.structured_output.compile.pool import CompileOutcome, CompilePool
from quire.structured_output.interface import GrammarSpec

MIN_ENTRY_BYTES = 1 << 16


class Asker(NamedTuple):
    """Who asks for a grammar.

    Attributes:
        tenant: waits in turn with others, and has a share of the cache.
        salt: grammars are found only by requests of the same one.
    """

    tenant: str
    salt: str


class GrammarCache:
    """Grammars by salt and content.

    Args:
        pool: compiles them.
        max_bytes: kept at most; beyond, the tenant that has most loses what it used longest ago.
    """

    def __init__(self, pool: CompilePool, max_bytes: int) -> None:
        self._pool = pool
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[Asker, GrammarSpec], Future[CompileOutcome]] = OrderedDict()

    def get(self, spec: GrammarSpec, asker: Asker) -> Future[CompileOutcome]:
        """The grammar of `spec`, compiled or compiling; a refusal is kept too, running over a budget is not."""
        key = (asker, spec)
        found = self._entries.get(key)
        if found is None or (found.done() and isinstance(found.exception(), BudgetError)):
            found = self._pool.compile(spec, asker.tenant)
            self._entries[key] = found
            self._entries.move_to_end(key)
            self._shrink()
        else:
            self._entries.move_to_end(key)
        return found

    @property
    def num_bytes(self) -> int:
        """Of what is kept."""
        return sum(_num_bytes(compiled) for compiled in self._entries.values())

    def forget(self, compiled: Future[CompileOutcome]) -> None:
        """No request waits for a grammar any more: it is not compiled, unless its turn has come."""
        if compiled.cancel():
            for key in [key for key, one in self._entries.items() if one is compiled]:
                del self._entries[key]

    def _shrink(self) -> None:
        """A grammar in use stays alive with its requests."""
        held: Counter[str] = Counter()
        for (asker, _), compiled in self._entries.items():
            held[asker.tenant] += _num_bytes(compiled)
        while held.total() > self._max_bytes:
            [(largest, _)] = held.most_common(1)
            oldest = next(key for key in self._entries if key[0].tenant == largest)
            held[largest] -= _num_bytes(self._entries.pop(oldest))


def _num_bytes(compiled: Future[CompileOutcome]) -> int:
    if not compiled.done() or compiled.cancelled() or compiled.exception() is not None:
        return MIN_ENTRY_BYTES
    return max(MIN_ENTRY_BYTES, compiled.result()[1])
