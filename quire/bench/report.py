"""The result of a run for people. No state."""

from __future__ import annotations

from typing import Any

from quire.bench.summary import METRICS, TITLES

NAMES = {
    "completed": "successful requests",
    "failed": "failed requests",
    "duration": "duration (s)",
    "total_input_tokens": "prompt tokens",
    "total_output_tokens": "output tokens",
    "tokens_per_event": "tokens per event",
    "request_throughput": "requests/s",
    "request_goodput": "goodput (requests/s)",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "total tokens/s",
    "max_concurrent_requests": "peak concurrency",
}


def print_report(result: dict[str, Any]) -> None:
    """Print a result as a table."""
    for key, name in NAMES.items():
        if key != "request_goodput" or result["goodput_objectives_ms"]:
            _print(name, result[key])
    print(f"{'tokens counted by':<32} {result['token_count_source']:>12}")
    for metric in METRICS:
        keys = [key for key in result if key.endswith(f"_{metric}_ms")]
        if keys:
            print(f"{TITLES[metric]} (ms)")
        for key in keys:
            _print(f"  {key.removesuffix(f'_{metric}_ms')}", result[key])
    for kind, count in result["failures_by_kind"].items():
        _print(f"failed: {kind}", count)
    for failure in result["first_failures"]:
        print(f"  request {failure['index']}: {failure['kind']}: {failure['message']}")
    for reason in result["client_limited"]:
        print(f"load generator saturated: {reason}")


def _print(name: str, value: float | None) -> None:
    text = "unknown" if value is None else f"{value}" if isinstance(value, int) else f"{value:.3f}"
    print(f"{name:<32} {text:>12}")
