"""`make test-lmcache`: engines over LMCache's server as it is: save, evict, load, and the server killed mid-way.

Run by a Python that has LMCache. Every answer is compared with that of an engine without a connector, tokens and
log-probabilities byte by byte. The last line says how many were wrong or lost.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.config.build import build_config
from quire.engine.config_lookup import resolve_config
from quire.engine.core_factory import build_core
from quire.platforms.detect import detect_platform
from quire.utils.phases import PhaseTimer
from tests.unit.scheduler.harness import make_request

BLOCK_SIZE, CHUNK_SIZE, NUM_TOKENS, MAX_TOKENS = 16, 32, 150, 12
PATIENCE_S = 240.0
Answer = tuple[tuple[int, ...], bytes]


class Engine:
    """An engine core of `leaf`; counts what its connector did."""

    def __init__(self, transfer: dict[str, Any] | None = None) -> None:
        platform = detect_platform("cpu")
        config = build_config(
            model="leaf", block_size=BLOCK_SIZE, max_model_len=256, num_gpu_blocks_override=120,
            kv_transfer_config=transfer,
        )  # fmt: skip
        config, _ = resolve_config(config, platform)
        self.core = build_core(config, platform, PhaseTimer())
        self.counts: Counter[str] = Counter()
        self.num_added = 0

    def answers(self, prompts: Sequence[list[int]], after: int = -1, act: Any = None) -> list[Answer | None]:
        """Of prompts that are asked at once; `act` is called after so many steps. None = it got no answer."""
        handles = {}
        for prompt in prompts:
            request = make_request(self.num_added, prompt, max_tokens=MAX_TOKENS, temperature=1.0, logprobs=3)
            self.core.add_request(dataclasses.replace(request, seed=7))
            handles[self.num_added] = len(handles)
            self.num_added += 1
        tokens: list[list[int]] = [[] for _ in prompts]
        logprobs = [b"" for _ in prompts]
        ended, deadline, num_steps = set[int](), time.monotonic() + PATIENCE_S, 0
        while self.core.has_work() and time.monotonic() < deadline:
            if num_steps == after:
                act()
            num_steps += 1
            outputs = self.core.step()
            if outputs is None:
                continue
            self.counts.update(outputs.stats.kv_connector or {})
            for handle, token in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
                tokens[handles[handle]].append(token)
            lines = outputs.logprobs
            for place, values in () if lines is None else zip(lines.index.tolist(), lines.logprobs, strict=True):
                logprobs[handles[int(outputs.handles[place])]] += values.tobytes()
            ended.update(handles[one.handle] for one in outputs.finished)
        self.core.reset_prefix_cache()
        return [(tuple(tokens[i]), logprobs[i]) if i in ended else None for i in range(len(prompts))]


class Server:
    """`lmcache server`, which may be killed and started again on its port."""

    def __init__(self, directory: Path, l1_gb: float) -> None:
        self.port, self._http_port = _free_port(), _free_port()
        self._log, self._l1_gb = directory / "server.log", l1_gb
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(Path(sys.prefix) / "bin" / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(self.port),
            "--http-host", "127.0.0.1", "--http-port", str(self._http_port), "--chunk-size", str(CHUNK_SIZE),
            "--l1-size-gb", str(self._l1_gb), "--eviction-policy", "LRU",
        ]  # fmt: skip
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
        with self._log.open("ab") as log:
            size = log.tell()
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + PATIENCE_S
        while b"Uvicorn running" not in self._log.read_bytes()[size:]:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"lmcache server did not start:\n{self._log.read_text()[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(l1_gb: float) -> Iterator[Server]:
    """A server that is gone at the end."""
    with tempfile.TemporaryDirectory() as directory:
        server = Server(Path(directory), l1_gb)
        server.start()
        try:
            yield server
        finally:
            server.kill()


class Check:
    """Answers against those of an engine without a connector."""

    def __init__(self, prompts: list[list[int]]) -> None:
        plain = Engine()
        self.prompts = prompts
        self._expected = [plain.answers([prompt])[0] for prompt in prompts]
        plain.core.shutdown()
        self.num_asked = self.num_wrong = self.num_lost = 0

    def ask(self, engine: Engine, what: str, **options: Any) -> None:
        """All prompts at once, and a line about what came of them."""
        before = Counter(engine.counts)
        for expected, found in zip(self._expected, engine.answers(self.prompts, **options), strict=True):
            self.num_asked += 1
            self.num_lost += found is None
            self.num_wrong += found is not None and found != expected
        counts = ", ".join(f"{name} {number:g}" for name, number in sorted((engine.counts - before).items()))
        print(f"{what}: wrong {self.num_wrong}, lost {self.num_lost}; {counts or 'nothing counted'}", flush=True)


def run(num_prompts: int, seed: int) -> int:
    """Number of answers that were wrong or lost, and of things that should have been counted."""
    rng = random.Random(seed)
    shared = [rng.randrange(5, 900) for _ in range(64)]
    check = Check([shared + [rng.randrange(5, 900) for _ in range(NUM_TOKENS - 64)] for _ in range(num_prompts)])
    problems = 0
    with serving(l1_gb=0.25) as server:
        extra = {
            "lmcache.mp.host": "127.0.0.1", "lmcache.mp.port": server.port, "lmcache.mp.mq_timeout": 2.0,
            "lmcache.mp.heartbeat_interval": 0.5,
        }  # fmt: skip
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        first = Engine(transfer)
        check.ask(first, "saved")
        check.ask(first, "evicted from the engine, loaded")
        problems += _missing(first, "loaded_blocks", num_prompts * (NUM_TOKENS // CHUNK_SIZE) * 2)
        second = Engine(transfer)
        check.ask(second, "loaded by a second engine")
        problems += _missing(second, "loaded_blocks", num_prompts * (NUM_TOKENS // CHUNK_SIZE) * 2)
        second.core.shutdown()
        for after in (0, 1, 3, 8):
            check.ask(first, f"server killed after {after} steps", after=after, act=server.kill)
            check.ask(first, "without a server")
            server.start()
            deadline, before = time.monotonic() + PATIENCE_S, first.counts["loaded_blocks"]
            while first.counts["loaded_blocks"] == before and time.monotonic() < deadline:
                check.ask(first, "with a new server")
        problems += _missing(first, "lmcache_failed_loads", 1) + _missing(first, "lmcache_failed_saves", 1)
        first.core.shutdown()
    version = importlib.metadata.version("lmcache")
    print(
        f"LMCache {version}: {check.num_asked} answers, {first.counts['loaded_blocks']:g} blocks loaded, 4 servers "
        f"killed; wrong {check.num_wrong}, lost {check.num_lost}, not counted {problems}"
    )
    return check.num_wrong + check.num_lost + problems


def _missing(engine: Engine, name: str, least: int) -> int:
    if engine.counts[name] >= least:
        return 0
    print(f"{name}: {engine.counts[name]:g}, which should be at least {least}")
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    raise SystemExit(min(1, run(args.prompts, args.seed)))


if __name__ == "__main__":
    main()
