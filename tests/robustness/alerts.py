"""`make test-alerts`: a real Prometheus watches a scripted day of real servers; alerts fire when they should.

The day: an ordinary load, which no alert may follow; then a tenant that floods, one that takes all, more requests than
the KV cache holds, requests that fail, a full disk, steps that are slow, an engine that sleeps, cores, a replica and a
front end that are killed, and a server that has gone. Then every query of the dashboard must return data. Durations of
the rules are divided by 10. What a day cannot bring about (`UNSEEN`) has its series in `alert_cases`, as all alerts
have, which promtool evaluates first. Root, for a small disk, and the binaries prometheus and promtool are needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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

from tests.robustness.alert_cases import RULES, judge
from tests.robustness.failing_rows import PROCESSOR
from tests.robustness.server_process import ServerProcess, cores_of, front_ends_of, wait_until

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
FASTER = 10
RATE_WINDOW = "30s"
QUIET_S = 20.0
UNSEEN = {"QuireIdleCoreIsBusy", "QuireMemoryGrows", "QuireThreadsGrow", "QuireIsSwapped", "QuireHugePagesAreMissing",
          "QuireRankIsSilent"}  # fmt: skip
"""Alerts of defects, and of machines that a test may not make: promtool alone judges them."""
KEYS = """\
tenants:
  users: {keys: [users-key-1]}
  greedy: {keys: [greedy-key-1]}
  flood: {keys: [flood-key-1], requests_per_minute: 5}
  ops: {keys: [operator-key-1], operator: true}
"""
CONFIG = """\
global: {{scrape_interval: 2s, scrape_timeout: 2s, evaluation_interval: 1s}}
rule_files: [alerts.yaml]
scrape_configs:
  - job_name: quire
    authorization: {{credentials: operator-key-1}}
    static_configs: [{{targets: [{targets}]}}]
"""


def scaled(rules: str) -> str:
    """Alert rules with every duration divided by FASTER."""

    def shorter(found: re.Match[str]) -> str:
        seconds = int(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]
        return f"{max(1, seconds // FASTER)}s"

    return re.sub(r"\b(\d+)([smh])\b(?=[\]:]|$)", shorter, rules, flags=re.MULTILINE)


class Watching:
    """Prometheus over servers, with the repository's alerts; ends when it is left."""

    def __init__(self, folder: Path, *ports: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._num_servers = len(ports)
        targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
        (folder / "prometheus.yml").write_text(CONFIG.format(targets=targets))
        (folder / "alerts.yaml").write_text(scaled(RULES.read_text()))
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={self._address}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        self.seen: set[str] = set()

    def __enter__(self) -> Watching:
        wait_until(lambda: len(self.query("up == 1")) == self._num_servers, "Prometheus has seen the servers")
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


class Day:
    """What happens to a server of one core, and to one of two replicas and two front ends."""

    def __init__(self, single: ServerProcess, several: ServerProcess, watch: Watching) -> None:
        self._single, self._several, self._watch = single, several, watch
        self._url = f"http://127.0.0.1:{single.port}"

    def run(self) -> None:
        """The day, up to the last server's end."""
        self.ordinary_load()
        self.floods()
        self.faults()
        self.slow_steps()
        self.sleep()
        self.deaths()

    def follows(self, alert: str, *, within_s: float = 240.0) -> None:
        """An alert must fire."""
        try:
            seconds = wait_until(lambda: alert in self._watch.firing(), f"{alert} fires", within_s)
        except AssertionError:
            sys.exit(f"{self._single.log[-3000:]}\n{alert} did not fire within {within_s:g} s")
        print(f"{alert}: after {seconds:.1f} s", flush=True)

    def load(self, tenant: str, num_threads: int, make: Callable[[int], dict[str, Any]]) -> Load:
        """Requests to the first server."""
        return Load(self._url, f"{tenant}-key-1", num_threads, make)

    def ordinary_load(self) -> None:
        """No alert fires."""
        of_several = Load(f"http://127.0.0.1:{self._several.port}", "users-key-1", 2, short)
        with self.load("users", 2, short), of_several:
            end = time.monotonic() + QUIET_S
            while time.monotonic() < end:
                assert not self._watch.firing(), f"an ordinary load: {self._watch.firing()}"
                time.sleep(0.5)

    def floods(self) -> None:
        """A tenant beyond its limit; one without a limit, which has the engine for itself."""
        with self.load("flood", 1, short):
            self.follows("QuireRefusesRequests")
        with self.load("users", 1, short), self.load("greedy", 40, long):
            for alert in ("QuireKVCacheIsFull", "QuireQueueIsLong", "QuireTenantTakesAll"):
                self.follows(alert)

    def faults(self) -> None:
        """Requests that fail, a disk that is full."""
        with self.load("users", 1, failing):
            self.follows("QuireRequestsFail")
        with self.load("users", 2, new_prompts):
            self.follows("QuireDiskFaults")

    def slow_steps(self) -> None:
        """The core's process runs a tenth of the time."""
        over = threading.Event()
        pid = self._single.core_pid

        def throttle() -> None:
            while not over.wait(0.03):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.27)
                os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=throttle)
        with self.load("users", 2, short):
            thread.start()
            try:
                self.follows("QuireStepsAreSlow")
            finally:
                over.set()
                thread.join()

    def sleep(self) -> None:
        """Requests come to an engine that sleeps, whose core is not missed."""
        self._ask("sleep")
        with self.load("users", 1, short):
            self.follows("QuireSleepsWhileRequestsCome")
        assert "QuireReplicaGone" not in self._watch.seen, "the engine sleeps"
        self._ask("wake_up")

    def deaths(self) -> None:
        """A core is killed, again and again; a replica, and a front end, as often as they are started."""
        with self.load("users", 2, short):
            os.kill(self._single.core_pid, signal.SIGKILL)
            for alert in ("QuireEngineRestarted", "QuireEngineCrashed"):
                self.follows(alert)
            for _ in range(3):
                self._wait_ready()
                time.sleep(2)
                os.kill(self._single.core_pid, signal.SIGKILL)
            self.follows("QuireEngineKeepsRestarting")
            self._wait_ready()
        for alert, find in (("QuireFrontEndGone", front_ends_of), ("QuireReplicaGone", cores_of)):
            with Killing(self._several.pid, find):
                self.follows(alert)

    def _wait_ready(self) -> None:
        wait_until(lambda: httpx.get(f"{self._url}/ready").status_code == 200, "the core is back")

    def _ask(self, what: str) -> None:
        answer = httpx.post(f"{self._url}/{what}", headers={"authorization": "Bearer operator-key-1"}, timeout=120)
        assert answer.status_code == 200, answer.text


class Killing:
    """Kills one of a server's two processes of a kind, and each that takes its place, until it is left."""

    def __init__(self, pid: int, find: Callable[[int], list[int]]) -> None:
        self._pid, self._find = pid, find
        self._spared = find(pid)[0]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Killing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._over.wait(0.2):
            for pid in self._find(self._pid):
                if pid != self._spared:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def check_dashboard(watch: Watching) -> int:
    """Every query of the dashboard has data now or had it in this day; returns their number."""
    dashboard = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
    queries = [(panel["title"], one["expr"]) for panel in dashboard["panels"] for one in panel.get("targets", ())]
    empty = []
    for title, query in queries:
        query = query.replace("$__rate_interval", RATE_WINDOW).replace("$instance", ".*").replace("$model", ".*")
        if not watch.query(f"max_over_time(({query})[30m:2s])"):
            empty.append(title)
    assert not empty, f"panels without data: {empty}"
    return len(queries)


def main() -> int:
    """Exit code 0 when every alert fired in its place."""
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        sys.exit("no prometheus: apt-get install --no-install-recommends prometheus")
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    names = {rule["alert"] for rule in group["rules"]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        problem = judge(folder)
        assert not problem, problem
        (folder / "keys.yaml").write_text(KEYS)
        disk = folder / "disk"
        disk.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(disk)], check=True)
        try:
            common = ["--api-key-file", str(folder / "keys.yaml"), "--crash-reports", str(folder / "reports")]
            common += ["--max-num-seqs", "8", "--max-model-len", "512"]
            of_single = [*common, "--kv-disk", str(disk), "--kv-disk-size", "1GiB", "--num-gpu-blocks-override", "40"]
            of_single += ["--enable-mfu-metrics", "--enable-sleep-mode", "--sleeping-requests", "reject"]
            of_single += ["--logits-processors", PROCESSOR]
            of_several = [*common, "--data-parallel-size", "2", "--api-server-count", "2"]
            with (
                ServerProcess(*of_single, "--speculative-config", '{"method": "suffix"}') as single,
                ServerProcess(*of_several) as several,
                Watching(folder, single.port, several.port) as watch,
            ):
                Day(single, several, watch).run()
                num_queries = check_dashboard(watch)
                single.stop()
                wait_until(lambda: "QuireDown" in watch.firing(), "QuireDown fires")
                missing = names - watch.seen - UNSEEN
        finally:
            subprocess.run(["umount", str(disk)], check=True)
    assert not missing, f"never fired: {missing}"
    print(
        f"test-alerts: {len(names)} alerts fire and are silent on their series; {len(names - UNSEEN)} fired in a day, "
        f"none on an ordinary load; {num_queries} queries have data"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
