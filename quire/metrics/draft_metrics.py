"""DraftMetrics: what drafts come to, counted for Prometheus under vLLM's names, and what was decided about them.

Made by `EngineMetrics` where something drafts; without it there are no such series, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.core.draft_stats import DraftOutcomes, accepted_by_position
from quire.core.speculation_stats import Reason, SpeculationStats
from quire.metrics.live_totals import value_of


class DraftMetrics:
    """The counters of one engine.

    Args:
        labels: of every series.
        num_positions: most drafts of a request in a step.
    """

    def __init__(self, labels: Mapping[str, str], num_positions: int, registry: CollectorRegistry) -> None:
        def counter(name: str, doc: str) -> Counter:
            return Counter(f"vllm:spec_decode_{name}", doc, list(labels), registry=registry).labels(**labels)

        self._drafts = counter("num_drafts", "Sequences with drafts, summed over steps.")
        self._draft_tokens = counter("num_draft_tokens", "Draft tokens verified.")
        self._accepted = counter("num_accepted_tokens", "Draft tokens accepted.")
        by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position in the draft.",
            [*labels, "position"], registry=registry,
        )  # fmt: skip
        self._by_position = [by_position.labels(**labels, position=str(i)) for i in range(num_positions)]
        self._labels, self._registry = labels, registry
        self._told = SpeculationStats()
        self._make_decisions()
        self._make_memory()

    @property
    def told(self) -> SpeculationStats:
        """What was decided, as far as the engine core has said."""
        return self._told

    def _make_decisions(self) -> None:
        labels, registry = self._labels, self._registry
        steps = Counter(
            "quire:spec_decode_steps", "Steps of decoding requests by what was decided about drafts.",
            [*labels, "reason"], registry=registry,
        )  # fmt: skip
        self._steps = {reason: steps.labels(**labels, reason=reason.value) for reason in Reason}
        self._proposed = Counter(
            "quire:spec_decode_num_proposed_tokens", "Draft tokens proposed; as many as pay are verified.",
            list(labels), registry=registry,
        ).labels(**labels)  # fmt: skip
        self._proposing = Counter(
            "quire:spec_decode_proposing_seconds", "Seconds that proposing took.", list(labels), registry=registry
        ).labels(**labels)
        self._closings = Counter(
            "quire:spec_decode_closings", "Classes of load closed to drafts because these were slower.",
            list(labels), registry=registry,
        ).labels(**labels)  # fmt: skip
        self._ratio = Gauge(
            "quire:spec_decode_speed_ratio",
            "Tokens per second with drafts over those without, as measured lately, by class of load; 1 = not measured.",
            [*labels, "load"], registry=registry,
        )  # fmt: skip
        self._closed = Gauge(
            "quire:spec_decode_closed", "1 = nothing is drafted at present in this class of load.",
            [*labels, "load"], registry=registry,
        )  # fmt: skip

    def _make_memory(self) -> None:
        def gauge(name: str, doc: str, read: Callable[[], float]) -> None:
            family = Gauge(f"quire:spec_decode_{name}", doc, list(self._labels), registry=self._registry)
            family.labels(**self._labels).set_function(read)

        gauge("store_bytes", "Memory of past answers that drafts come from.", lambda: self._told.store_bytes)
        gauge("store_answers", "Past answers that drafts come from.", lambda: self._told.num_stored)
        gauge("history_bytes", "Memory of indices of running requests' texts.", lambda: self._told.history_bytes)

    def record(self, outcomes: DraftOutcomes) -> None:
        """Take in the drafts of one step."""
        self._drafts.inc(len(outcomes.handles))
        self._draft_tokens.inc(int(outcomes.num_drafted.sum()))
        self._accepted.inc(int(outcomes.num_accepted.sum()))
        for count, series in zip(accepted_by_position(outcomes.num_accepted), self._by_position, strict=False):
            series.inc(count)

    def totals(self) -> tuple[float, float]:
        """(draft tokens verified, draft tokens accepted) so far."""
        return value_of([self._draft_tokens]), value_of([self._accepted])

    def note(self, stats: SpeculationStats) -> None:
        """As `show`, where another process counts: only `told` changes."""
        self._told = stats

    def show(self, stats: SpeculationStats) -> None:
        """Take in what the engine core has decided since it started."""
        before, self._told = self._told.controller, stats
        if stats.controller is None:
            return
        new = stats.controller.since(before)
        for reason, count in new.reasons.items():
            self._steps[reason].inc(count)
        self._proposed.inc(new.num_proposed)
        self._proposing.inc(new.proposing_s)
        self._closings.inc(new.num_closings)
        for bucket in new.buckets:
            self._ratio.labels(**self._labels, load=bucket.name).set(bucket.ratio)
            self._closed.labels(**self._labels, load=bucket.name).set(bucket.is_closed)
