"""PerfMetrics: operations and bytes of steps, and what the machine does at most. Made by `EngineMetrics` if asked for.

MFU = quire:step_flops_total per quire:step_seconds_total, over quire:limit_flops; MBU the same with bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.core.step_perf import STEP_KINDS, StepPerf


class PerfMetrics:
    """Series of one engine.

    Attributes:
        flops, moved_bytes: of all steps; possible_flops, possible_bytes: at the limits, in the same time.
    """

    def __init__(self, labels: Mapping[str, str], registry: CollectorRegistry) -> None:
        def counters(name: str, doc: str) -> dict[str, Counter]:
            family = Counter(f"quire:{name}", doc, [*labels, "kind"], registry=registry)
            return {kind: family.labels(**labels, kind=kind) for kind in STEP_KINDS}

        def of_gpu(name: str, doc: str) -> Counter:
            return Counter(f"vllm:estimated_{name}_per_gpu", doc, list(labels), registry=registry).labels(**labels)

        self._flops = of_gpu("flops", "Operations of a rank's steps, from the shape of the model.")
        self._read = of_gpu("read_bytes", "Bytes of weights, keys, values and states that a rank's steps read.")
        self._write = of_gpu("write_bytes", "Bytes of keys, values and states that a rank's steps wrote.")
        self._by_kind = counters("step_flops", "These operations by kind of step: prefill, decode, mixed.")
        self._bytes = counters("step_bytes", "Bytes that these steps read and wrote.")
        self._seconds = counters("step_seconds", "Seconds that these steps took.")
        limits = ("limit_flops", "limit_bytes_per_second")
        docs = (
            "Operations per second of a rank in matrix products at most, as measured here; 0 = not measured.",
            "Bytes per second that a rank reads from memory at most, as measured; 0 = not measured.",
        )
        self._limits = [
            Gauge(f"quire:{name}", doc, list(labels), registry=registry).labels(**labels)
            for name, doc in zip(limits, docs, strict=True)
        ]
        self.flops = self.moved_bytes = self.possible_flops = self.possible_bytes = 0.0

    def record(self, step: StepPerf) -> None:
        """Add a step."""
        num_bytes = step.read_bytes + step.write_bytes
        self._flops.inc(step.flops)
        self._read.inc(step.read_bytes)
        self._write.inc(step.write_bytes)
        self._by_kind[step.kind].inc(step.flops)
        self._bytes[step.kind].inc(num_bytes)
        self._seconds[step.kind].inc(step.seconds)
        self._limits[0].set(step.flops_limit)
        self._limits[1].set(step.bytes_limit)
        self.flops += step.flops
        self.moved_bytes += num_bytes
        self.possible_flops += step.seconds * step.flops_limit
        self.possible_bytes += step.seconds * step.bytes_limit
