"""Caches of equal pages, written from their papers for the tests: slow, plain, and nothing shared with the policies."""

from __future__ import annotations

from collections.abc import Iterable


def lru_hits(trace: Iterable[int], size: int) -> int:
    """Hits of a cache of `size` pages that drops the least recently used."""
    pages: list[int] = []
    hits = 0
    for page in trace:
        if page in pages:
            hits += 1
            pages.remove(page)
        elif len(pages) == size:
            pages.pop(0)
        pages.append(page)
    return hits


def lfu_hits(trace: Iterable[int], size: int) -> int:
    """The same, dropping the page with the fewest uses; of several the one whose last use is oldest."""
    uses: dict[int, tuple[int, int]] = {}
    hits = 0
    for time, page in enumerate(trace):
        if page in uses:
            hits += 1
            uses[page] = (uses[page][0] + 1, time)
            continue
        if len(uses) == size:
            del uses[min(uses, key=lambda one: uses[one])]
        uses[page] = (1, time)
    return hits


class ARC:
    """ARC(c) of Megiddo and Modha 2003, figure 4, line by line. Lists begin with the least recently used page."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.T1: list[int] = []
        self.T2: list[int] = []
        self.B1: list[int] = []
        self.B2: list[int] = []

    def replace(self, x: int) -> None:
        if self.T1 and ((x in self.B2 and len(self.T1) == self.p) or len(self.T1) > self.p):
            self.B1.append(self.T1.pop(0))
        else:
            self.B2.append(self.T2.pop(0))

    def request(self, x: int) -> bool:
        """Whether page x was there."""
        c = self.c
        if x in self.T1 or x in self.T2:  # case I
            (self.T1 if x in self.T1 else self.T2).remove(x)
            self.T2.append(x)
            return True
        if x in self.B1:  # case II
            delta = 1.0 if len(self.B1) >= len(self.B2) else len(self.B2) / len(self.B1)
            self.p = min(self.p + delta, float(c))
            self.replace(x)
            self.B1.remove(x)
            self.T2.append(x)
            return False
        if x in self.B2:  # case III
            delta = 1.0 if len(self.B2) >= len(self.B1) else len(self.B1) / len(self.B2)
            self.p = max(self.p - delta, 0.0)
            self.replace(x)
            self.B2.remove(x)
            self.T2.append(x)
            return False
        if len(self.T1) + len(self.B1) == c:  # case IV A
            if len(self.T1) < c:
                self.B1.pop(0)
                self.replace(x)
            else:
                self.T1.pop(0)
        else:  # case IV B
            total = len(self.T1) + len(self.T2) + len(self.B1) + len(self.B2)
            if total >= c:
                if total == 2 * c:
                    self.B2.pop(0)
                self.replace(x)
        self.T1.append(x)
        return False


def arc_hits(trace: Iterable[int], size: int) -> int:
    """Hits of ARC(size)."""
    cache = ARC(size)
    return sum(cache.request(page) for page in trace)
