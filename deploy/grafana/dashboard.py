"""Writes quire.json, the Grafana dashboard: `python deploy/grafana/dashboard.py` (`make dashboards`).

A panel is a title, a unit and its queries, by row; what all panels share is written once, here. `make test-alerts` runs
each query against a real Prometheus and expects data.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parent / "quire.json"
ENGINE = 'job="quire",instance=~"$instance",model_name=~"$model"'
SERVER = 'job="quire",instance=~"$instance"'
RATE = "$__rate_interval"

Query = tuple[str, str]
"""PromQL and legend."""


def rate(metric: str, by: str, labels: str = ENGINE) -> str:
    """Per second, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[{RATE}]))"


def quantiles(histogram: str) -> list[Query]:
    """p50, p90 and p99 of a histogram over all instances."""
    return [
        (f"histogram_quantile({q}, {rate(f'{histogram}_bucket', 'le')})", f"p{round(q * 100)}")
        for q in (0.5, 0.9, 0.99)
    ]


def mean(histogram: str) -> str:
    """Mean of a histogram, by instance."""
    return f"{rate(f'{histogram}_sum', 'instance')} / {rate(f'{histogram}_count', 'instance')}"


ROWS: list[tuple[str, list[tuple[str, str, list[Query]]]]] = [
    ("What users feel", [
        ("Time to first token", "s", quantiles("vllm:time_to_first_token_seconds")),
        ("Between tokens", "s", quantiles("vllm:inter_token_latency_seconds")),
        ("Queue time", "s", quantiles("vllm:request_queue_time_seconds")),
        ("Whole request", "s", quantiles("vllm:e2e_request_latency_seconds")),
    ]),
    ("Throughput", [
        ("Tokens per second", "short", [
            (rate("vllm:generation_tokens_total", "instance"), "generated {{instance}}"),
            (rate("vllm:prompt_tokens_total", "instance"), "prompts {{instance}}"),
        ]),
        ("Requests finished, by reason", "reqps", [
            (rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),
        ]),
        ("Requests refused, by tenant and reason", "reqps", [
            (rate("quire:requests_refused_total", "tenant, reason", SERVER), "{{tenant}}: {{reason}}"),
        ]),
        ("Tokens per step", "short", [(mean("vllm:iteration_tokens_total"), "{{instance}}")]),
    ]),
    ("Scheduler", [
        ("Running and waiting", "short", [
            (f"sum by (instance) (vllm:num_requests_running{{{ENGINE}}})", "running {{instance}}"),
            (f"sum by (instance) (vllm:num_requests_waiting{{{ENGINE}}})", "waiting {{instance}}"),
        ]),
        ("Waiting, by reason", "short", [
            (f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{ENGINE}}})", "{{reason}}"),
        ]),
        ("KV cache in use", "percentunit", [(f"vllm:kv_cache_usage_perc{{{ENGINE}}}", "{{instance}} {{engine}}")]),
        ("Preemptions", "ops", [(rate("quire:preemptions_total", "mode", SERVER), "{{mode}}")]),
    ]),
    ("Prefixes and tiers", [
        ("Prompt tokens found in the prefix cache", "percentunit", [
            (f"{rate('vllm:prefix_cache_hits_total', 'instance')} / "
             f"{rate('vllm:prefix_cache_queries_total', 'instance')}", "{{instance}}"),
        ]),
        ("Why prefixes were not found", "ops", [(rate("quire:prefix_cache_misses_total", "reason"), "{{reason}}")]),
        ("Blocks from and to host memory and disk", "ops", [
            (rate("quire:kv_offload_loaded_blocks_total", "instance", SERVER), "loaded {{instance}}"),
            (rate("quire:kv_offload_stored_blocks_total", "instance", SERVER), "stored {{instance}}"),
        ]),
        ("Faults of the disk", "ops", [(rate("quire:kv_offload_faults_total", "kind", SERVER), "{{kind}}")]),
    ]),
    ("Processes", [
        ("Restarts of the engine core", "short", [(f"quire:engine_restarts{{{SERVER}}}", "{{instance}}")]),
        ("Streams that went on after a restart", "short", [(f"quire:resumed_streams{{{SERVER}}}", "{{instance}}")]),
        ("Memory of the front end", "bytes", [(f"process_resident_memory_bytes{{{SERVER}}}", "{{instance}}")]),
        ("CPUs of the front end", "short", [(rate("process_cpu_seconds_total", "instance", SERVER), "{{instance}}")]),
    ]),
    ("Engine cores", [
        ("Memory of engine cores", "bytes", [
            (f"quire:core_resident_memory_bytes{{{ENGINE}}}", "{{instance}} {{engine}}/{{rank}}"),
        ]),
        ("Memory by what it is for", "bytes", [
            (f"sum by (part) (quire:core_memory_bytes{{{ENGINE}}})", "{{part}}"),
        ]),
        ("Huge pages", "bytes", [
            (f"sum by (kind) (quire:core_huge_page_bytes{{{ENGINE}}})", "{{kind}}"),
        ]),
        ("CPUs of engine cores", "short", [
            (rate("quire:core_cpu_seconds_total", "instance, engine, rank"), "{{instance}} {{engine}}/{{rank}}"),
        ]),
    ]),
    ("State of the engine", [
        ("Engine cores that run", "short", [(f"quire:core_up{{{ENGINE}}}", "{{instance}} {{engine}}")]),
        ("Reports of crashes", "short", [(f"quire:crash_reports_total{{{ENGINE}}}", "{{instance}} {{engine}}")]),
        ("Threads of engine cores", "short", [
            (f"quire:core_threads{{{ENGINE}}}", "{{instance}} {{engine}}/{{rank}}"),
        ]),
        ("Sleep state", "short", [
            (f"vllm:engine_sleep_state{{{ENGINE}}} == 1", "{{instance}} {{sleep_state}}"),
            (f"quire:num_requests_held{{{ENGINE}}}", "{{instance}} requests held"),
        ]),
    ]),
    ("Work and use", [
        ("MFU by kind of step", "percentunit", [
            (f"{rate('quire:step_flops_total', 'kind')} / {rate('quire:step_seconds_total', 'kind')} "
             f"/ scalar(max(quire:limit_flops{{{ENGINE}}}))", "{{kind}}"),
        ]),
        ("MBU by kind of step", "percentunit", [
            (f"{rate('quire:step_bytes_total', 'kind')} / {rate('quire:step_seconds_total', 'kind')} "
             f"/ scalar(max(quire:limit_bytes_per_second{{{ENGINE}}}))", "{{kind}}"),
        ]),
        ("Tokens generated by tenant", "short", [
            (rate("quire:tenant_generated_tokens_total", "tenant", SERVER), "{{tenant}}"),
        ]),
        ("Prompt tokens by tenant", "short", [
            (rate("quire:tenant_prompt_tokens_total", "tenant", SERVER), "{{tenant}}"),
            (rate("quire:tenant_cached_tokens_total", "tenant", SERVER), "cached {{tenant}}"),
        ]),
    ]),
]  # fmt: skip

REPLICAS: tuple[str, list[tuple[str, str, list[Query]]]] = ("Replicas and front ends (where there are several)", [
    ("Replicas that are ready", "short", [(f"quire:replicas_ready{{{SERVER}}}", "{{instance}}")]),
    ("Front ends", "short", [
        (f"quire:front_ends_ready{{{SERVER}}}", "ready {{instance}}"),
        (f"quire:front_ends{{{SERVER}}}", "wanted {{instance}}"),
    ]),
    ("Front ends replaced", "short", [(f"quire:front_end_restarts_total{{{SERVER}}}", "{{instance}}")]),
])  # fmt: skip

SPECULATION: tuple[str, list[tuple[str, str, list[Query]]]] = ("Speculation (where it is configured)", [
    ("Drafts accepted", "percentunit", [
        (f"{rate('vllm:spec_decode_num_accepted_tokens_total', 'instance')} / "
         f"{rate('vllm:spec_decode_num_draft_tokens_total', 'instance')}", "{{instance}}"),
    ]),
    ("Decisions about drafts, steps", "ops", [(rate("quire:spec_decode_steps_total", "reason"), "{{reason}}")]),
    ("Speed with drafts over speed without", "short", [(f"quire:spec_decode_speed_ratio{{{ENGINE}}}", "{{load}}")]),
    ("Memory of past answers", "bytes", [(f"quire:spec_decode_store_bytes{{{ENGINE}}}", "{{instance}}")]),
])  # fmt: skip


def panel(title: str, unit: str, queries: list[Query], number: int, x: int, y: int) -> dict[str, Any]:
    """A plot over time."""
    targets = [
        {"refId": "ABCDEFG"[i], "expr": expression, "legendFormat": legend, "datasource": source()}
        for i, (expression, legend) in enumerate(queries)
    ]
    defaults = {"unit": unit, "min": 0, "custom": {"fillOpacity": 8, "spanNulls": 60000}}
    return {
        "id": number, "type": "timeseries", "title": title, "datasource": source(), "targets": targets,
        "gridPos": {"x": x, "y": y, "w": 6, "h": 7},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }  # fmt: skip


def source() -> dict[str, str]:
    """The data source that the dashboard's first field chooses."""
    return {"type": "prometheus", "uid": "${source}"}


def choice(name: str, label: str) -> dict[str, Any]:
    """A field that chooses among a label's values; by default all."""
    query = f'label_values(vllm:num_requests_running{{job="quire"}}, {label})'
    return {
        "name": name, "label": label, "type": "query", "datasource": source(), "query": query, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    for row, (title, plots) in enumerate([*ROWS, REPLICAS, SPECULATION]):
        y = 8 * row
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}}
        )
        panels += [panel(*plot, len(panels) + 1 + i, 6 * i, y + 1) for i, plot in enumerate(plots)]
    variables = [
        {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        choice("instance", "instance"),
        choice("model", "model_name"),
    ]
    return {
        "uid": "quire", "title": "Quire", "tags": ["quire"], "schemaVersion": 41, "refresh": "30s", "editable": True,
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": variables}, "panels": panels,
    }  # fmt: skip


def text() -> str:
    """The file's contents."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
