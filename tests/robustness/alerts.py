"""`make test-alerts`: a real Prometheus watches a scripted day of a real server; every alert fires when it should.

The day: an ordinary load, which no alert may follow; then a tenant that floods, more requests than the KV cache holds,
requests that fail, a full disk, an engine core that is killed, and a server that has gone. Then every query of the
dashboard must return data. Durations of the rules are divided by 15. Root, for a small disk, and the binary prometheus
are needed.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.robustness.failing_rows import PROCESSOR
from tests.robustness.server_process import ServerProcess, wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FASTER = 15
RATE_WINDOW = "20s"
QUIET_S = 20.0
KEYS = """\
tenants:
  users: {keys: [users-key-1]}
  flood: {keys: [flood-key-1], requests_per_minute: 5}
  ops: {keys: [operator-key-1], operator: true}
"""
CONFIG = """\
global: {{scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}}
rule_files: [alerts.yaml]
scrape_configs:
  - job_name: quire
    authorization: {{credentials: operator-key-1}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


def scaled(rules: str) -> str:
    """Alert rules with every duration divided by FASTER."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
        return f"{max(1, seconds // FASTER)}s"

    return re.sub(r"\b(\d+)([smh])\b(?=\]|$)", shorter, rules, flags=re.MULTILINE)


class Watching:
    """Prometheus over a server, with the repository's alerts; ends when it is left."""

    def __init__(self, folder: Path, port: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        (folder / "prometheus.yml").write_text(CONFIG.format(port=port))
        (folder / "alerts.yaml").write_text(scaled((DEPLOY / "prometheus" / "alerts.yaml").read_text()))
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={self._address}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        self.seen: set[str] = set()

    def __enter__(self) -> Watching:
        wait_until(lambda: self.query("up"), "Prometheus answers")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)

    def _get(self, path: str, **params: str) -> Any:
        assert self._process.poll() is None, self.log.read_text()
        try:
            answer = httpx.get(f"http://{self._address}/api/v1/{path}", params=params, timeout=10)
        except httpx.TransportError:
            return {}
        assert answer.status_code in (200, 503), answer.text
        return answer.json().get("data", {}) if answer.status_code == 200 else {}

    def query(self, expression: str) -> list[Any]:
        """What an instant query finds."""
        return list(self._get("query", query=expression).get("result", []))

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        alerts = self._get("alerts").get("alerts", [])
        found = {one["labels"]["alertname"] for one in alerts if one["state"] == "firing"}
        self.seen |= found
        return found


class Load:
    """Requests of one tenant in threads, until it is left."""

    def __init__(self, url: str, key: str, num_threads: int, make: Callable[[int], dict[str, Any]]) -> None:
        self._url, self._key, self._make = url, key, make
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(num_threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(180)

    def _run(self, number: int) -> None:
        headers = {"authorization": f"Bearer {self._key}"}
        with httpx.Client(base_url=self._url, headers=headers, timeout=180) as client:
            while not self._stop.is_set():
                try:
                    client.post("/v1/completions", json={"model": "leaf", "temperature": 0, **self._make(number)})
                except httpx.TransportError:
                    time.sleep(0.2)
                number += len(self._threads)


def short(number: int) -> dict[str, Any]:
    """A few tokens after one of five long prompts."""
    return {"prompt": f"Story {number % 5}. " + "The fox went home. " * 20, "max_tokens": 16}


def long(number: int) -> dict[str, Any]:
    """An answer that takes a large part of the cache."""
    return {"prompt": f"Story {number}. Once upon a time", "max_tokens": 300, "ignore_eos": True}


def failing(number: int) -> dict[str, Any]:
    """One that ends with an error."""
    return {"prompt": f"Story {number}", "max_tokens": 4, "vllm_xargs": {"fail": 1}}


def new_prompts(number: int) -> dict[str, Any]:
    """Prompts that were never seen, so that their blocks go to the disk."""
    return {"prompt": f"{number} {number * 7919} " * 60, "max_tokens": 2}


def the_day(url: str, server: ServerProcess, watch: Watching) -> None:
    """What happens, and the alerts that must follow."""

    def follows(alert: str, *, within_s: float = 120.0) -> None:
        try:
            seconds = wait_until(lambda: alert in watch.firing(), f"{alert} fires", within_s)
        except AssertionError:
            sys.exit(f"{server.log[-3000:]}\n{alert} did not fire within {within_s:g} s")
        print(f"{alert}: after {seconds:.1f} s", flush=True)

    with Load(url, "users-key-1", 2, short):
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            assert not watch.firing(), f"an ordinary load: {watch.firing()}"
            time.sleep(0.5)
    with Load(url, "flood-key-1", 1, short):
        follows("QuireRefusesRequests")
    with Load(url, "users-key-1", 40, long):
        follows("QuireKVCacheIsFull")
        follows("QuireQueueIsLong")
    with Load(url, "users-key-1", 1, failing):
        follows("QuireRequestsFail")
    with Load(url, "users-key-1", 2, new_prompts):
        follows("QuireDiskFaults")
    with Load(url, "users-key-1", 2, short):
        os.kill(server.core_pid, signal.SIGKILL)
        follows("QuireEngineRestarted")
        for _ in range(3):
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the core is back")
            time.sleep(2)
            os.kill(server.core_pid, signal.SIGKILL)
        follows("QuireEngineKeepsRestarting")
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the core is back")


def check_dashboard(watch: Watching) -> int:
    """Every query of the dashboard has data now or had it in this day; returns their number."""
    dashboard = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
    script = runpy.run_path(str(DEPLOY / "grafana" / "dashboard.py"))
    optional = {plot[0] for plot in script["SPECULATION"][1]}
    queries = [
        (panel["title"], target["expr"])
        for panel in dashboard["panels"] if panel["title"] not in optional
        for target in panel.get("targets", ())
    ]  # fmt: skip
    empty = []
    for title, query in queries:
        query = query.replace("$__rate_interval", RATE_WINDOW).replace("$instance", ".*").replace("$model", ".*")
        if not watch.query(f"max_over_time(({query})[15m:1s])"):
            empty.append(title)
    assert not empty, f"panels without data: {empty}"
    return len(queries)


def main() -> int:
    """Exit code 0 when every alert fired in its place."""
    if shutil.which("prometheus") is None:
        sys.exit("no prometheus: apt-get install --no-install-recommends prometheus")
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yaml").read_text())["groups"]
    names = {rule["alert"] for rule in group["rules"]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "keys.yaml").write_text(KEYS)
        disk = folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(disk)], check=True)
        try:
            flags = ["--api-key-file", str(folder / "keys.yaml"), "--kv-disk", str(disk), "--kv-disk-size", "1GiB"]
            flags += ["--max-num-seqs", "8", "--max-model-len", "512", "--num-gpu-blocks-override", "40"]
            flags.append("--enable-mfu-metrics")
            with ServerProcess(
                *flags, "--logits-processors", PROCESSOR, "--speculative-config", '{"method": "suffix"}'
            ) as server:
                url = f"http://127.0.0.1:{server.port}"
                with Watching(folder, server.port) as watch:
                    the_day(url, server, watch)
                    num_queries = check_dashboard(watch)
                    server.stop()
                    wait_until(lambda: "QuireDown" in watch.firing(), "QuireDown fires")
                    missing = names - watch.seen
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    assert not missing, f"never fired: {missing}"
    print(f"test-alerts: {len(names)} alerts fired, none on an ordinary load; {num_queries} queries have data")
    return 0


if __name__ == "__main__":
    sys.exit(main())
