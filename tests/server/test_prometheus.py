"""A stock Prometheus scrapes `/metrics`, and has every documented series with the values of our page."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_metrics import documented
from tests.server.test_protocol import CHAT, HELLO, post
from tests.server.test_safety import bearer

BINARY = shutil.which("prometheus")
KEY = "operator-key-1"
ABSENT = (
    "quire:model_",
    "quire:models_",
    "quire:kv_connector_",
    "vllm:spec_decode_",
    "quire:spec_decode_",
    "quire:kv_offload_",
    "vllm:estimated_",
    "quire:step_flops",
    "quire:step_bytes",
    "quire:step_seconds",
    "quire:limit_",
    "quire:front_end",
    "quire:replicas_ready",
)
"""Metrics of servers of several models, of connectors, drafts and tiers, which this server has not."""
TIMES = {"vllm:lora_requests_info"}
"""Metrics whose value is the time at which they are read."""
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

CONFIG = """\
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: quire
    authorization: {{credentials: {key}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


KEYS = f"""\
tenants:
  ops: {{keys: [{KEY}], operator: true}}
  red: {{keys: [red-key-1234], requests_per_minute: 2}}
"""


class Prometheus:
    """The stock binary on a loopback port, its data in `folder`, while it is entered."""

    def __init__(self, folder: Path, target_port: int) -> None:
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        (folder / "prometheus.yml").write_text(CONFIG.format(port=target_port, key=KEY))

    def __enter__(self) -> Prometheus:
        assert BINARY is not None
        self._log = (self._folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                BINARY, f"--config.file={self._folder}/prometheus.yml", f"--storage.tsdb.path={self._folder}/data",
                f"--web.listen-address={self._address}",
            ],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an instant query finds; nothing while it does not answer."""
        assert self._process.poll() is None, (self._folder / "log").read_text()
        try:
            answer = httpx.get(f"http://{self._address}/api/v1/query", params={"query": expression}, timeout=60)
        except httpx.TransportError:
            return []
        found: list[dict[str, Any]] = answer.json()["data"]["result"] if answer.status_code == 200 else []
        return found

    def series(self) -> Series:
        """What it has scraped of us last."""
        found: Series = {}
        for one in self.query('{job="quire"}'):
            labels = {name: value for name, value in one["metric"].items() if name not in ("job", "instance")}
            found[labels.pop("__name__"), frozenset(labels.items())] = float(one["value"][1])
        return found


def series_of(page: str) -> Series:
    """Our page's own series; labels that are empty are none to Prometheus."""
    return {
        (sample.name, frozenset((name, value) for name, value in sample.labels.items() if value)): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith(("vllm:", "quire:"))
    }


@pytest.mark.skipif(BINARY is None, reason="the binary prometheus is not installed")
def test_a_stock_prometheus_has_every_documented_series_with_our_values(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    with RunningServer(ScriptedEngine(), api_key_file=str(keys)) as server:
        for n in (1, 2, 3):
            post(server, CHAT, {**HELLO, "max_tokens": 5, "n": n}, headers=bearer("red-key-1234"))
        post(server, CHAT, {**HELLO, "max_tokens": 5, "stream": True}, headers=bearer(KEY))
        server.state.metrics.show_start("engine_core", [("weights", 1.5)])
        server.engine.step(
            num_new_tokens=7, num_running=3, num_waiting=2, kv_cache_usage=0.25, prefix_cache_queries=64,
            prefix_cache_hits=32, num_preemptions=1, num_scheduled_tokens=100,
        )  # fmt: skip
        ours = series_of(httpx.get(server.url + "/metrics", headers=bearer(KEY)).text)
        with Prometheus(tmp_path, server.port) as prometheus:
            server.wait_until(lambda: [one["value"][1] for one in prometheus.query('up{job="quire"}')] == ["1"])
            server.wait_until(lambda: len(prometheus.series()) > len(ours))
            scraped = prometheus.series()
            types = {one["metric"]["__name__"] for one in prometheus.query('{job="quire",__name__=~"process_.*"}')}
    assert "process_resident_memory_bytes" in types
    missing = [key for key in ours if key not in scraped]
    assert not missing
    assert not any(map(math.isnan, ours.values()))
    still = [key for key in ours if key[0] not in TIMES and not key[0].startswith("quire:core_")]  # of a process
    assert {key: scraped[key] for key in still} == {key: ours[key] for key in still}
    refused = frozenset({("reason", "requests_per_minute"), ("tenant", "red")})
    assert scraped["quire:requests_refused_total", refused] == 1
    names = {name for name, _ in scraped}
    for name, (kind, _) in documented().items():
        if name.startswith(ABSENT):
            continue
        parts = [f"{name}_{part}" for part in ("bucket", "sum", "count")] if kind == "histogram" else [name]
        assert names.issuperset(parts), name
