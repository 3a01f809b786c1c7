"""DraftMetrics: what drafts come to, counted for Prometheus under vLLM's names.

Made by `EngineMetrics` where speculation is configured; without it there are no such series, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

from quire.core.draft_stats import DraftOutcomes, accepted_by_position


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

    def record(self, outcomes: DraftOutcomes) -> None:
        """Take in the drafts of one step."""
        self._drafts.inc(len(outcomes.handles))
        self._draft_tokens.inc(int(outcomes.num_drafted.sum()))
        self._accepted.inc(int(outcomes.num_accepted.sum()))
        for count, series in zip(accepted_by_position(outcomes.num_accepted), self._by_position, strict=False):
            series.inc(count)
