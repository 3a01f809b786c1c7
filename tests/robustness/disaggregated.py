"""`make test-vllm-router`: prefill and decode servers behind vllm-router, which is a program of others.

    QUIRE_ROUTER=PATH/vllm-router python -m tests.robustness.disaggregated --requests 200

One prefill and two decode servers; the router sends each request to the prefill server, and its `kv_transfer_params` to
a decode server. After a third of the answers one decode server is killed, core and front-end. Answers are compared with
those of a server without a connector. What ends with an error is asked again, as clients do. The last line counts.
Before that the commands of docs/how-to/prefill-decode.md are run as they are written, but for the ports.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.robustness.prefill_decode import FLAGS, NUM_AT_ONCE, Check, ask, content, counts_of
from tests.robustness.router import find_router, free_port, is_ready
from tests.robustness.server_process import ServerProcess, wait_until

MAX_TRIES, PAUSE_S = 20, 0.5
PAGE = Path(__file__).parents[2] / "docs/how-to/prefill-decode.md"


def transfer(connector: str, role: str) -> str:
    """Settings of a server."""
    return json.dumps({"kv_connector": connector, "kv_role": role, "kv_port": 0, "kv_load_timeout_s": 10})


@contextlib.contextmanager
def router(program: str, prefill: ServerProcess, decodes: list[ServerProcess]) -> Iterator[str]:
    """The router in front of these; its address."""
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        program, "--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--vllm-pd-disaggregation",
        "--prefill", f"http://127.0.0.1:{prefill.port}", "--kv-connector", "nixl", "--policy", "round_robin",
        "--health-check-interval-secs", "1", "--health-failure-threshold", "2",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()),
    ]  # fmt: skip
    for one in decodes:
        command += ["--decode", f"http://127.0.0.1:{one.port}"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until(lambda: is_ready(url), "the router answers", 60.0)
            yield url
        except BaseException:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Killer:
    """Kills a server when so many answers have come."""

    def __init__(self, victim: ServerProcess, after: int) -> None:
        self._victim, self._left = victim, after
        self._lock = threading.Lock()

    def note_answer(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left == 0:
                for pid in (self._victim.core_pid, self._victim.pid):
                    os.kill(pid, signal.SIGKILL)


def run(program: str, connector: str, count: int, seed: int) -> int:
    """How many answers were wrong, and what else was not as it should be."""
    check = Check(count, seed)
    num_errors = num_wrong = num_right = num_lost = 0
    with ExitStack() as stack:
        prefill = stack.enter_context(ServerProcess(*FLAGS, "--kv-transfer-config", transfer(connector, "kv_producer")))
        decodes = [
            stack.enter_context(ServerProcess(*FLAGS, "--kv-transfer-config", transfer(connector, "kv_consumer")))
            for _ in range(2)
        ]
        url = stack.enter_context(router(program, prefill, decodes))
        killer = Killer(decodes[0], count // 3)

        def tried(number: int) -> tuple[str | None, int]:
            for num_errors in range(MAX_TRIES):
                try:
                    return content(ask(url, *check.bodies[number])), num_errors
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    print(f"request {number}: {error!r}", file=sys.stderr)
                    time.sleep(PAUSE_S)
                finally:
                    killer.note_answer()
            return None, MAX_TRIES

        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            for number, (found, errors) in enumerate(threads.map(tried, range(count))):
                num_errors += errors
                num_lost += found is None
                num_right += found == check.expected[number]
                if found is not None and found != check.expected[number]:
                    num_wrong += 1
                    print(f"request {number}: {found}\nexpected: {check.expected[number]}", file=sys.stderr)
        counts = counts_of(decodes[1])
    print(f"the decode server that was not killed: {dict(counts)}")
    is_unused = counts["loaded_blocks"] < count or not num_errors
    print(
        f"{count} requests through vllm-router ({connector}), one of two decode servers killed: {num_right} with the "
        f"bytes of one server, {num_errors} asked again; wrong {num_wrong}, lost {num_lost}"
    )
    return num_wrong + num_lost + is_unused


def check_page(program: str) -> int:
    """Run the commands of docs/how-to/prefill-decode.md, on other ports; how many answers are not as it says."""
    ports = {number: str(free_port()) for number in ("8100", "8200", "8000", "14579")}
    text = re.sub("|".join(ports), lambda found: ports[found[0]], PAGE.read_text())
    servers, by_hand, router_command = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[:3]
    environment = {**os.environ, "PATH": f"{Path(program).absolute().parent}{os.pathsep}{os.environ['PATH']}"}
    this_quire = f"{sys.executable} -m quire "
    commands = [*re.sub("^quire ", this_quire, servers.strip(), flags=re.MULTILINE).splitlines(), router_command]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, port in zip(commands, ("8100", "8200", "8000"), strict=True):
            quiet = subprocess.DEVNULL
            run_it = ["bash", "-c", f"exec {command}"]
            processes.append(subprocess.Popen(run_it, env=environment, stdout=quiet, stderr=quiet))
            wait_until(functools.partial(is_ready, f"http://127.0.0.1:{ports[port]}"), command)
        shown = subprocess.run(["bash", "-c", by_hand], capture_output=True, check=True).stdout
        found = [json.loads(shown)]
        (prompt,) = re.findall(r"^prompt='(.*)'$", by_hand, re.MULTILINE)
        body = {"model": "leaf", "max_tokens": 32, **json.loads(f"{{{prompt}}}")}
        found.append(ask(f"http://127.0.0.1:{ports['8000']}", "/v1/completions", body))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found]
    print(f"the page's commands: {cached} tokens were not computed by the decode server")
    return sum(number < 32 for number in cached) + (found[0]["choices"][0]["text"] != found[1]["choices"][0]["text"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--connector", default="TCPConnector")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    program = find_router()
    if program is None or not Path(program).exists():
        raise SystemExit("vllm-router is not there: make test-vllm-router installs it; or set QUIRE_ROUTER")
    num_bad = check_page(program) + run(program, args.connector, args.requests, args.seed)
    raise SystemExit(min(1, num_bad))


if __name__ == "__main__":
    main()
