"""What an exchange between ranks takes: named interconnects with their sources, and one measured on this machine.

Called by `division`. Values and a reader; no state.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quire.errors import ConfigError, ValidationError, unknown_name

MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """What connects a rank to the others.

    Attributes:
        latency_s: seconds of an exchange of nothing.
        bandwidth: bytes per second that reach a rank.
        source: where the figures are from.
        points: measured (bytes of each rank's part, seconds of an all-gather between `num_measured` ranks), by bytes;
            empty = nothing was measured.
    """

    name: str
    latency_s: float
    bandwidth: float
    source: str
    points: tuple[tuple[int, float], ...] = ()
    num_measured: int = 2

    def gather_seconds(self, part_bytes: float, num_ranks: int) -> float:
        """Every rank gets the parts of all others, each of so many bytes."""
        if num_ranks < 2:
            return 0.0
        if self.points:
            return self._measured(part_bytes) * (num_ranks - 1) / (self.num_measured - 1)
        return self.latency_s + (num_ranks - 1) * part_bytes / self.bandwidth

    def send_seconds(self, num_bytes: float) -> float:
        """One rank sends to one other."""
        if self.points:
            return self._measured(num_bytes) / (self.num_measured - 1)
        return self.latency_s + num_bytes / self.bandwidth

    def with_share(self, share: float) -> Interconnect:
        """What is reached of a data sheet's bandwidth; measured ones are as they are."""
        return self if self.points else dataclasses.replace(self, bandwidth=self.bandwidth * share)

    def _measured(self, num_bytes: float) -> float:
        sizes = [size for size, _ in self.points]
        place = bisect_left(sizes, num_bytes)
        if place == 0:
            return self.points[0][1]
        if place == len(sizes):
            size, seconds = self.points[-1]
            return seconds * num_bytes / size
        (low, low_s), (high, high_s) = self.points[place - 1 : place + 1]
        return low_s + (high_s - low_s) * (num_bytes - low) / (high - low)


INTERCONNECTS: Mapping[str, Interconnect] = {
    one.name: one
    for one in (
        Interconnect(
            name="nvlink", latency_s=10e-6, bandwidth=450e9,
            source="NVIDIA H100 data sheet: NVLink 4, 900 GB/s both ways; 10 us for a collective is assumed",
        ),
        Interconnect(
            name="pcie4", latency_s=15e-6, bandwidth=32e9,
            source="PCI Express 4.0 x16: 16 GT/s, 32 GB/s each way; 15 us for a collective is assumed",
        ),
        Interconnect(
            name="pcie5", latency_s=15e-6, bandwidth=63e9,
            source="PCI Express 5.0 x16: 32 GT/s, 63 GB/s each way; 15 us for a collective is assumed",
        ),
        Interconnect(
            name="socket", latency_s=5e-6, bandwidth=24e9,
            source="Intel UPI 2.0: 16 GT/s, 24 GB/s each way and link, one link between two of four sockets; "
            "5 us for an exchange in shared memory is assumed",
        ),
        Interconnect(
            name="100gbe", latency_s=75e-6, bandwidth=12.5e9,
            source="IEEE 802.3: 100 Gbit/s; 75 us for an exchange over TCP is assumed (50 to 100 us are usual)",
        ),
        Interconnect(
            name="shared-memory", latency_s=8.5e-6, bandwidth=10e9,
            points=((64, 8.5e-6), (4096, 8.9e-6), (65536, 12.4e-6), (1048576, 99e-6), (4194304, 648e-6)),
            source="measured: all-gather of 2 processes on a 2-core EPYC (Zen 5), docs/LOG.md, 2026-11-23",
        ),
    )
}  # fmt: skip


def find_interconnect(name: str) -> Interconnect:
    """By its name, or from a file that `benchmarks/kernels/bench_communicator.py --out FILE` wrote.

    Raises:
        ConfigError: there is neither.
        ValidationError: the file holds something else.
    """
    found = INTERCONNECTS.get(name.lower())
    if found is not None:
        return found
    path = Path(name)
    if not path.is_file():
        raise unknown_name("interconnect", name, (*INTERCONNECTS, "FILE"))
    return read_interconnect(path)


class _Size(msgspec.Struct):
    """One line of the benchmark."""

    bytes: int
    all_gather_us: float


class _Measured(msgspec.Struct):
    """What the benchmark writes, as far as it is used."""

    ranks: int
    sizes: list[_Size]


def read_interconnect(path: Path) -> Interconnect:
    """What the communicator's benchmark measured.

    Raises:
        ConfigError: the file cannot be read.
        ValidationError: it is not such a file.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than 1 MiB: not an interconnect", field="interconnect")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", field="interconnect") from None
    try:
        measured = msgspec.json.decode(data, type=_Measured)
    except (msgspec.DecodeError, ValueError) as error:
        raise _not_one(path, str(error)) from None
    points = [(size.bytes, 1e-6 * size.all_gather_us) for size in measured.sizes]
    if measured.ranks < 2 or not points or min(min(point) for point in points) <= 0:
        raise _not_one(path, "it needs 2 ranks or more, and sizes and times above 0")
    if points != sorted(set(points)) or len({size for size, _ in points}) != len(points):
        raise _not_one(path, "sizes must ascend")
    return Interconnect(
        name=path.name, latency_s=points[0][1], bandwidth=points[-1][0] / points[-1][1], points=tuple(points),
        num_measured=measured.ranks, source=f"measured: all-gather of {measured.ranks} processes, {path.name}",
    )  # fmt: skip


def _not_one(path: Path, why: str) -> ValidationError:
    return ValidationError(
        f"{path} is not a measured interconnect: {why}",
        hint="create it with benchmarks/kernels/bench_communicator.py --out FILE", field="interconnect",
    )  # fmt: skip
