"""The page against a loaded server, in headless Chromium: `make test-page`.

Starts `quire serve` with the embedded model, keeps more requests in it than it has rows, and has `drive.py` open every
tab. Playwright and axe-core come into build/page; Chromium is the machine's. The last line is one JSON object: frames a
second with the load, findings of axe-core, and what the page's looks cost the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "page"
PLAYWRIGHT, AXE = "playwright==1.65.2", "axe-core@4.14.1"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
START_S = 120


def find_browser() -> str:
    """The machine's Chromium; installed from Debian's archive where this user may."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    subprocess.run(["apt-get", "install", "-y", "-q", "--no-install-recommends", BROWSERS[0]], check=True)
    return shutil.which(BROWSERS[0]) or sys.exit("no Chromium: apt-get install chromium-headless-shell")


def playwright_python() -> str:
    """The Python of an environment with playwright."""
    python = HOME / "venv" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", HOME / "venv"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", PLAYWRIGHT], check=True)
    return str(python)


def axe_file() -> Path:
    """axe-core, as one script."""
    script = HOME / "package" / "axe.min.js"
    if not script.exists():
        command = ["npm", "pack", AXE, "--silent", "--pack-destination", HOME]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(next(HOME.glob("axe-core-*.tgz"))) as archive:
            archive.extract("package/axe.min.js", HOME, filter="data")
    return script


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """`quire serve leaf` on a free port; its URL."""
    log = HOME / "server.log"
    command = [sys.executable, "-m", "quire", "serve", "leaf", "--port", "0", "--disable-access-log", *flags]
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file) as process:
        try:
            deadline, found = time.monotonic() + START_S, None
            while not found and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.2)
                found = re.search(r"listening on (http://[\d.:]+)", log.read_text())
            if not found:
                sys.exit(f"the server did not start:\n{log.read_text()[-2000:]}")
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGINT)


async def load(url: str, count: int, max_tokens: int) -> None:
    """Keep `count` requests in the server."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=count + 8)) as client:

        async def ask(number: int) -> None:
            turn = 0
            while True:
                prompt = [10] * 64 + [number % 2500 + 5, turn % 2500 + 10, 7] * 20
                body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
                await client.post(f"{url}/v1/completions", json=body)
                turn += 1

        await asyncio.gather(*(ask(number) for number in range(count)))


def look_cost(url: str, looks: int = 10) -> dict[str, float]:
    """What a look takes in the engine core, in milliseconds, while the server is loaded."""
    taken = []
    for _ in range(looks):
        time.sleep(0.5)
        with urllib.request.urlopen(f"{url}/debug/state") as answer:
            taken.append(1e3 * json.load(answer)["models"][0]["engines"][0]["collect_s"])
    return {"median_ms": round(sorted(taken)[looks // 2], 3), "most_ms": round(max(taken), 3)}


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=8, help="kept in the server while the page is driven")
    parser.add_argument("--rows", type=int, default=4, help="max_num_seqs of the server")
    parser.add_argument("--screenshots", type=Path, default=HOME / "screenshots")
    args = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    browser, python, axe = find_browser(), playwright_python(), axe_file()
    with server("--max-num-seqs", str(args.rows), "--num-gpu-blocks-override", str(100 * args.rows)) as url:
        command = [
            sys.executable,
            "-c",
            f"import asyncio; from tests.page.run import load; asyncio.run(load({url!r}, {args.requests}, 400))",
        ]
        with subprocess.Popen(command, cwd=ROOT) as loading:
            try:
                drive = [python, str(ROOT / "tests/page/drive.py"), f"{url}/", browser, str(axe), str(args.screenshots)]
                done = subprocess.run(drive, stdout=subprocess.PIPE, text=True)
                print(done.stdout, end="")
                found = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
                print(json.dumps({**found, "look": look_cost(url), "passed": done.returncode == 0}))
            finally:
                loading.kill()
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
