"""For each alert, series on which it fires and series on which it does not, evaluated by promtool.

    python -m tests.robustness.alert_cases

Called by `make test-alerts` before the scripted day, and by the suite where promtool is installed. Series are a name
with its own labels and a value for each minute, in promtool's notation: "0+60x20" is 0, 60, 120, ... for 20 minutes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
COMMON = 'job="quire",instance="a:8000"'
ENGINE = 'model_name="m",engine="0"'
RANK = f'{ENGINE},rank="0"'
MINUTES = 20

Series = dict[str, str]

AWAKE = f'vllm:engine_sleep_state{{{ENGINE},sleep_state="awake"}}'
PAUSED = 'quire:requests_refused_total{reason="paused",tenant="t"}'
HELD = f"quire:num_requests_held{{{ENGINE}}}"
UP = f"quire:core_up{{{ENGINE}}}"
BUSY = f'quire:core_cpu_seconds_total{{{RANK},mode="user"}}'
RUNNING, WAITING = f"vllm:num_requests_running{{{ENGINE}}}", f"vllm:num_requests_waiting{{{ENGINE}}}"
USAGE, PREEMPTED = f"vllm:kv_cache_usage_perc{{{ENGINE}}}", f"vllm:num_preemptions_total{{{ENGINE}}}"
REPORTS = f"quire:crash_reports_total{{{ENGINE}}}"
OTHER = f'quire:core_memory_bytes{{{RANK},part="other"}}'
ASKED, OBTAINED = (f'quire:core_huge_page_bytes{{{RANK},kind="{kind}"}}' for kind in ("asked", "obtained"))
RESIDENT = f"quire:core_resident_memory_bytes{{{RANK}}}"
SWAPPED, FAULTS = (
    f"quire:core_swapped_memory_bytes{{{RANK}}}", f'quire:core_page_faults_total{{{RANK},kind="major"}}',
)  # fmt: skip
STEP_BYTES, STEP_SECONDS = (f'quire:step_{what}_total{{{ENGINE},kind="decode"}}' for what in ("bytes", "seconds"))
SILENCE, THREADS = f"quire:core_silence_seconds{{{RANK}}}", f"quire:core_threads{{{RANK}}}"
FAILED = f'vllm:request_success_total{{{ENGINE},finished_reason="error"}}'
FAULT = 'quire:kv_offload_faults_total{kind="disk_full"}'
LATE, ALL = (f'vllm:request_queue_time_seconds_bucket{{{ENGINE},le="{le}"}}' for le in ("5.0", "+Inf"))
FRONT_ENDS, FRONT_ENDS_READY = "quire:front_ends", "quire:front_ends_ready"


def tokens(tenant: str, per_minute: int) -> Series:
    """What a tenant gets."""
    return {
        f'quire:tenant_generated_tokens_total{{tenant="{tenant}"}}': f"0+{per_minute}x{MINUTES}",
        f'quire:tenant_requests_total{{tenant="{tenant}"}}': f"0+{1 + per_minute // 100}x{MINUTES}",
    }


CASES: dict[str, tuple[Series, Series]] = {
    "QuireDown": ({"up": "1x5 0x15"}, {"up": "1x20"}),
    "QuireEngineRestarted": ({"quire:engine_restarts": "0x15 1x5"}, {"quire:engine_restarts": "1x20"}),
    "QuireEngineKeepsRestarting": (
        {"quire:engine_restarts": "0x12 1 1 2 2 3 3 3"}, {"quire:engine_restarts": "0x12 1 1 2 2 2 2 2"},
    ),
    "QuireQueueIsLong": (
        {LATE: "0+1x20", ALL: "0+10x20", LATE.replace("5.0", "10.0"): "0+10x20"},
        {LATE: "0+10x20", ALL: "0+10x20", LATE.replace("5.0", "10.0"): "0+10x20"},
    ),
    "QuireRefusesRequests": (
        {'quire:requests_refused_total{reason="max_concurrent",tenant="t"}': "0+60x20"},
        {'quire:requests_refused_total{reason="max_concurrent",tenant="t"}': "0+1x20"},
    ),
    "QuireKVCacheIsFull": (
        {USAGE: "0.99x20", PREEMPTED: "0+5x20"}, {USAGE: "0.99x20", PREEMPTED: "7x20"},
    ),
    "QuireDiskFaults": ({FAULT: "0x15 3x5"}, {FAULT: "3x20"}),
    "QuireRequestsFail": ({FAILED: "0+1x20"}, {FAILED: "4x20"}),
    "QuireEngineCrashed": ({REPORTS: "0x15 1x5"}, {REPORTS: "3x20"}),
    "QuireReplicaGone": ({UP: "1x5 0x15", AWAKE: "1x20"}, {UP: "1x5 0x15", AWAKE: "1x5 0x15"}),
    "QuireFrontEndGone": (
        {FRONT_ENDS: "4x20", FRONT_ENDS_READY: "4x5 3x15"}, {FRONT_ENDS: "4x20", FRONT_ENDS_READY: "4x18 3x2"},
    ),
    "QuireSleepsWhileRequestsCome": (
        {AWAKE: "1x5 0x15", HELD: "0x5 3x15"}, {AWAKE: "1x5 0x15", HELD: "0x20", PAUSED: "9x20"},
    ),
    "QuireTenantTakesAll": (
        {**tokens("a", 9900), **tokens("b", 100), WAITING: "20x20"},
        {**tokens("a", 9900), **tokens("b", 5000), WAITING: "20x20"},
    ),
    "QuireStepsAreSlow": (
        {STEP_BYTES: "0+60000x60 3600000+6000x15", STEP_SECONDS: "0+30x75"},
        {STEP_BYTES: "0+60000x60 3600000+6000x15", STEP_SECONDS: "0+30x60 1800+3x15"},  # less work, of the same speed
    ),
    "QuireIdleCoreIsBusy": ({BUSY: "0+60x20", RUNNING: "0x20"}, {BUSY: "0+60x20", RUNNING: "3x20"}),
    "QuireMemoryGrows": ({OTHER: "1e9+2e6x400"}, {OTHER: "1e9+2e7x40 2e9x360"}),  # against a start that fills buffers
    "QuireThreadsGrow": ({THREADS: "40+2x70"}, {THREADS: "40x30 60x40"}),
    "QuireIsSwapped": ({SWAPPED: "0x5 2e8x15", FAULTS: "0x20"}, {SWAPPED: "1e6x20", FAULTS: "0+600x20"}),
    "QuireHugePagesAreMissing": (
        {ASKED: "8e9x20", OBTAINED: "1e8x20", RESIDENT: "9e9x20"},
        {ASKED: "149e6x20", OBTAINED: "35e6x20", RESIDENT: "305e6x20"},  # leaf, whose captures were never touched
    ),
    "QuireRankIsSilent": ({SILENCE: "0x15 30+60x5"}, {SILENCE: "0.2x20"}),
}  # fmt: skip


def minutes_of(values: str) -> int:
    """How long a series is."""
    return sum(int(run[1]) if (run := re.search(r"x(\d+)$", part)) else 1 for part in values.split())


def rule_tests(rules: Path) -> dict[str, Any]:
    """All cases as promtool takes them (JSON is YAML)."""
    tests = []
    for alert, cases in CASES.items():
        for fires, series in zip((True, False), cases, strict=True):
            end = max(map(minutes_of, series.values()))
            tests.append({
                "name": f"{alert} {'fires' if fires else 'is silent'}",
                "interval": "1m",
                "input_series": [{"series": with_common(name), "values": values} for name, values in series.items()],
                "promql_expr_test": [{
                    "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})', "eval_time": f"{end}m",
                    "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                }],
            })  # fmt: skip
    return {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}


def with_common(name: str) -> str:
    """A series with the labels that every one has."""
    return name.replace("{", f"{{{COMMON},", 1) if "{" in name else f"{name}{{{COMMON}}}"


def judge(folder: Path) -> str:
    """What promtool says against the cases; "" = all hold."""
    file = folder / "alerts_test.yaml"
    file.write_text(json.dumps(rule_tests(RULES)))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def main() -> int:
    """Exit code 0 when all hold."""
    with tempfile.TemporaryDirectory() as folder:
        problem = judge(Path(folder))
    print(problem or f"{len(CASES)} alerts fire, and are silent, where they should")
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
