"""How long a model takes to come back when two share the memory for one: loads from the page cache, per GB of files.

Two names for one checkpoint (by default a random one of the 0.5B shape, 1 GB in bfloat16) are asked in turn, so that
every request is a switch: the other model is unloaded, this one loaded. The first load of each is not counted: it reads
the disk and writes packed weights. Run alone on the machine:

    python -m benchmarks.server.bench_switch [--model DIR|FILE.gguf] [--switches 8] [--no-spare] [flags of quire serve]

Prints each switch, where the time of the last one went, and last the median in seconds per GB.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from quire.config.switching import read_models_file
from quire.server.switching.loader import CoreLoader

LISTENING = re.compile(r"listening on (http://\S+);")
START_TIMEOUT_S, REQUEST_TIMEOUT_S = 120.0, 600.0
SHAPE = "qwen-0.5b"
NAMES = ("one", "other")
SETTINGS = {"max_model_len": 4096, "max_num_seqs": 8}
SPARE_S = 6.0
"""Between two switches, so that the spare process is ready: shorter turns wait for its imports."""


def main() -> int:
    """Measure and print; 0 when every request was answered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="directory or GGUF file; default: a random checkpoint")
    parser.add_argument("--switches", type=int, default=8)
    parser.add_argument("--pause", type=float, default=SPARE_S, help="seconds between switches")
    parser.add_argument("--no-spare", action="store_true", help="without a spare process")
    args, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="switch") as name:
        directory = Path(name)
        model = args.model or str(write_model(directory))
        path = write_file(directory, model, has_spare=not args.no_spare)
        return measure(directory, path, args.switches, args.pause, flags)


def write_model(directory: Path) -> Path:
    """A random checkpoint of the shape."""
    command = [sys.executable, "benchmarks/checkpoints.py", SHAPE, "--out", str(directory)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return next(path.parent for path in directory.rglob("config.json"))


def write_file(directory: Path, model: str, *, has_spare: bool) -> Path:
    """The file of models: one checkpoint under two names, with a budget for one of them."""
    path, lines = directory / "models.yaml", [f"  {name}: {{model: {json.dumps(model)}}}" for name in NAMES]
    path.write_text("\n".join(["models:", *lines]))
    entry = read_models_file(path, SETTINGS).models[0]
    num_bytes = CoreLoader(entry.name, entry.config, 256 << 20).measure().num_bytes
    head = [f"memory_budget: {int(1.5 * num_bytes)}", f"spare_process: {str(has_spare).lower()}", "models:"]
    path.write_text("\n".join([*head, *lines]))
    return path


def measure(directory: Path, path: Path, num_switches: int, pause_s: float, flags: list[str]) -> int:
    """Serve, switch, print."""
    log_path = directory / "log"
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
    command = [sys.executable, "-m", "quire", "serve", "--models", str(path), "--port", "0", *settings, *flags]
    with log_path.open("w") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            url = wait_for_address(log_path, server)
            file_gb = switch_all(url, num_switches, pause_s)
        finally:
            server.terminate()
            server.wait(60)
    loads = [line for line in log_path.read_text().splitlines() if "server ready in" in line]
    print(loads[-1].partition("model ")[2] if loads else "", flush=True)
    print(json.dumps(file_gb))
    return 0


def wait_for_address(log_path: Path, server: subprocess.Popen[bytes]) -> str:
    """Where the server listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while (found := LISTENING.search(log_path.read_text())) is None:
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{log_path.read_text()}")
        time.sleep(0.05)
    return found[1]


def switch_all(url: str, num_switches: int, pause_s: float) -> dict[str, float]:
    """The figures of `num_switches` switches, after a first load of both."""
    seconds: list[float] = []
    with httpx.Client(base_url=url, timeout=REQUEST_TIMEOUT_S) as client:
        for number in range(num_switches + len(NAMES)):
            name = NAMES[number % len(NAMES)]
            body = {"model": name, "prompt": "Once", "max_tokens": 1, "temperature": 0}
            start = time.perf_counter()
            answer = client.post("/v1/completions", json=body).raise_for_status()
            total_s, waited_s = time.perf_counter() - start, float(answer.headers.get("x-quire-model-wait", 0.0))
            is_counted = number >= len(NAMES)
            if is_counted:
                seconds.append(waited_s)
            print(f"{'switch' if is_counted else 'first load'} to {name}: {waited_s:.2f} s, with its first token "
                  f"{total_s:.2f} s", flush=True)  # fmt: skip
            time.sleep(pause_s)
        cards = client.get("/v1/models").json()["data"]
    gb = cards[0]["file_bytes"] / 1e9
    median = statistics.median(seconds)
    return {
        "file_gb": round(gb, 3), "switch_s_median": round(median, 3), "switch_s_max": round(max(seconds), 3),
        "s_per_gb": round(median / gb, 3),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
