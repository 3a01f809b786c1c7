"""CountPage: what a process has counted, in memory that another process can read after its death.

Made by the owner of several front ends, one for each of their processes, which puts the values of its counters and
histograms there (`install`). Each number has a name, written before it is counted: nothing is lost with the process.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
import threading
from collections.abc import MutableSequence, Sequence
from typing import cast

import msgspec
from prometheus_client import values
from prometheus_client.samples import Exemplar

from quire.logger import get_logger
from quire.metrics.family_sums import ADDED_TYPES, Family
from quire.metrics.histogram import QuickHistogram

MAX_CELLS = 1 << 15
NAMES_BYTES = 16 << 20
HEAD = struct.Struct("<QQ")
"""Cells that are named; bytes of their names."""
LENGTH = struct.Struct("<I")

logger = get_logger(__name__)


class CellName(msgspec.Struct, frozen=True, array_like=True):
    """What a cell counts: the sample of a family. Buckets of histograms count what is in no smaller one."""

    family: str
    documentation: str
    type: str
    sample: str
    labels: dict[str, str]


class CountPage:
    """Cells and their names, in a file without a name.

    Args:
        fd: of the file, which stays open.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._cells_at = HEAD.size
        self._names_at = HEAD.size + 8 * MAX_CELLS
        size = self._names_at + NAMES_BYTES
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        self._cells = memoryview(self._memory)[self._cells_at : self._names_at].cast("d")
        self._decode = msgspec.msgpack.Decoder(CellName).decode
        self._lock = threading.Lock()
        self._is_full = False

    @staticmethod
    def create() -> CountPage:
        """A new one, all zero. Most of its file is never written and takes no memory."""
        directory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryFile(dir=directory) as file:
            return CountPage(os.dup(file.fileno()))

    def close(self) -> None:
        """Close the file; what was counted can still be read. Harmless when repeated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def add(self, names: Sequence[CellName]) -> MutableSequence[float]:
        """Cells with these names, one behind the other; memory of this process alone once there is no room."""
        blocks = [msgspec.msgpack.encode(name) for name in names]
        data = b"".join(LENGTH.pack(len(block)) + block for block in blocks)
        with self._lock:
            count, size = HEAD.unpack_from(self._memory)
            if count + len(names) > MAX_CELLS or size + len(data) > NAMES_BYTES:
                self._note_full()
                return [0.0] * len(names)
            start = self._names_at + size
            self._memory[start : start + len(data)] = data
            HEAD.pack_into(self._memory, 0, count + len(names), size + len(data))
        return cast(MutableSequence[float], self._cells[count : count + len(names)])

    def families(self) -> list[Family]:
        """What was counted so far."""
        count, size = HEAD.unpack_from(self._memory)
        found: dict[str, Family] = {}
        at = self._names_at
        end = at + size
        for cell in range(count):
            (length,) = LENGTH.unpack_from(self._memory, at)
            if at + LENGTH.size + length > end:
                break
            name = self._decode(self._memory[at + LENGTH.size : at + LENGTH.size + length])
            at += LENGTH.size + length
            family = found.setdefault(name.family, Family(name.family, name.documentation, name.type, []))
            family.samples.append((name.sample, name.labels, self._cells[cell]))
        return [_cumulated(one) if one.type == "histogram" else one for one in found.values()]

    def install(self) -> None:
        """Have the counters of this process, all that are made from now on, count here."""
        values.ValueClass = lambda *arguments, **named: _new_value(self, *arguments, **named)
        QuickHistogram.new_row = self._new_row

    def _new_row(self, name: str, doc: str, bounds: Sequence[str], labels: dict[str, str]) -> MutableSequence[float]:
        """The counts of a `QuickHistogram`, and its sum."""
        cells = [CellName(name, doc, "histogram", f"{name}_bucket", {**labels, "le": bound}) for bound in bounds]
        return self.add([*cells, CellName(name, doc, "histogram", f"{name}_sum", labels)])

    def _note_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            logger.warning("more series than %d: what new ones count is lost when this front end dies", MAX_CELLS)


class CellValue:
    """A number in a page, as `prometheus_client.values.MutexValue` keeps one."""

    _multiprocess = False

    def __init__(self, cell: MutableSequence[float]) -> None:
        self._cell = cell
        self._lock = threading.Lock()
        self._exemplar: Exemplar | None = None

    def inc(self, amount: float) -> None:
        """Count."""
        with self._lock:
            self._cell[0] += amount

    def set(self, value: float, timestamp: float | None = None) -> None:
        """Replace it."""
        with self._lock:
            self._cell[0] = value

    def get(self) -> float:
        """The number."""
        return self._cell[0]

    def set_exemplar(self, exemplar: Exemplar) -> None:
        """Keep an exemplar, in this process alone."""
        self._exemplar = exemplar

    def get_exemplar(self) -> Exemplar | None:
        """The last one."""
        return self._exemplar


def _new_value(
    page: CountPage, kind: str, family: str, sample: str, labels: Sequence[str], values_of: Sequence[str], doc: str,
    **_: object,
) -> values.MutexValue | CellValue:  # fmt: skip
    """What counts for a metric of `prometheus_client`."""
    if kind not in ADDED_TYPES:
        return values.MutexValue(kind, family, sample, labels, values_of, doc)  # type: ignore[no-untyped-call]
    name = CellName(family, doc, kind, sample, dict(zip(labels, map(str, values_of), strict=True)))
    return CellValue(page.add([name]))


def _cumulated(family: Family) -> Family:
    """A histogram as it is shown: each bucket with those below, and the count of all."""
    rows: dict[tuple[tuple[str, str], ...], list[tuple[str, dict[str, str], float]]] = {}
    sums = []
    for sample, labels, value in family.samples:
        if sample.endswith("_bucket"):
            rows.setdefault(tuple(one for one in labels.items() if one[0] != "le"), []).append((sample, labels, value))
        else:
            sums.append((sample, labels, value))
    samples = list(sums)
    for others, row in rows.items():
        total = 0.0
        for sample, labels, value in row:  # in the order of their bounds, as they were named
            total += value
            samples.append((sample, labels, total))
        samples.append((f"{family.name}_count", dict(others), total))
    return Family(family.name, family.documentation, family.type, samples)
