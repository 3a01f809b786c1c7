"""A Ray cluster of two machines, which are network namespaces here, under faults: every stream is compared.

`make test-ray` (root). Each machine has its own network and its own /tmp; one command starts Ray on each, one the
server. Then a rank's process, the engine core and Ray's own process on either machine are killed, and the network is
cut for 10 seconds, all while streams run. The last line is the number of answers that are wrong or missing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.robustness.http_streams import Exchange, answer_of, ask
from tests.robustness.server_process import ROOT, ServerProcess

CLONE_NEWNET = 0x40000000
CUT_S = 10.0
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PLACED = re.compile(r"ranks placed by Ray: .*process (\d+)")
LISTENING = re.compile(r"listening on http://127\.0\.0\.1:(\d+); ready in")
SILENCE = re.compile(r"nothing has come from rank \d+ for [\d.]+ s|nothing came from rank \d+, on another machine")
START_TIMEOUT_S = 240.0


class Hosts:
    """Two network namespaces with a cable between them; `close` leaves nothing of them."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="qr"))
        self.names = tuple(f"quire{os.getpid()}{letter}" for letter in "ab")
        self._own = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._started: list[subprocess.Popen[bytes]] = []
        for name in self.names:
            run("ip", "netns", "add", name)
        ends = [f"q{os.getpid() % 100000}{letter}" for letter in "ab"]
        run("ip", "link", "add", ends[0], "netns", self.names[0], "type", "veth", "peer", "name", ends[1], "netns",
            self.names[1])  # fmt: skip
        for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                run("ip", "-n", name, "link", "set", device, "up")
            (self.root / name).mkdir()
        self._ends = ends
        self._token = secrets.token_hex(32)

    def start(self, host: int, *command: str, log: str) -> subprocess.Popen[bytes]:
        """A program of one machine."""
        name = self.names[host]
        inside = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /tmp && exec "$@"', str(self.root / name), *command]
        variables = {
            **os.environ, "HOME": str(self.root), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        with (self.root / log).open("ab") as output:
            started = subprocess.Popen(
                ["ip", "netns", "exec", name, *inside], cwd=ROOT, env=variables, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._started.append(started)
        return started

    def start_ray(self, host: int, cpus: int) -> None:
        """Ray's part of one machine, by the one command that users give; returns when it runs."""
        head = ["--head", "--port=6379", "--include-dashboard=false"]
        where = head if host == 0 else [f"--address={ADDRESSES[0]}:6379"]
        log = f"ray{host}{time.monotonic_ns()}"
        ray = str(Path(sys.executable).parent / "ray")
        self.start(
            host, ray, "start", *where, f"--node-ip-address={ADDRESSES[host]}", f"--num-cpus={cpus}",
            "--object-store-memory=100000000", "--disable-usage-stats", "--block", log=log,
        )  # fmt: skip
        self.wait_for(log, re.compile("Ray runtime started"))

    def wait_for(self, log: str, pattern: re.Pattern[str], timeout_s: float = START_TIMEOUT_S) -> re.Match[str]:
        """The last match in a log, when there is one."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = list(pattern.finditer(self.text(log)))
            if found:
                return found[-1]
            time.sleep(0.2)
        raise SystemExit(f"not seen within {timeout_s} s: {pattern.pattern}\n{self.text(log)[-3000:]}")

    def text(self, log: str) -> str:
        """Of a log so far."""
        return (self.root / log).read_text(errors="replace")

    def pids(self, host: int, name: str) -> list[int]:
        """Processes of one machine with a name."""
        found = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split() if comm_of(int(pid)) == name]

    def cut(self, is_cut: bool) -> None:
        """The cable, on both ends."""
        for name, end in zip(self.names, self._ends, strict=True):
            run("ip", "-n", name, "link", "set", end, "down" if is_cut else "up")

    @contextlib.contextmanager
    def on_first(self):  # type: ignore[no-untyped-def]
        """This thread is on the first machine."""
        with open(f"/var/run/netns/{self.names[0]}") as there:
            enter(there.fileno())
        try:
            yield
        finally:
            enter(self._own)

    def close(self) -> None:
        """End every process of both machines, and remove them."""
        enter(self._own)
        for name in self.names:
            for _ in range(50):
                found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
                pids = [int(pid) for pid in found.stdout.split() if int(pid) != os.getpid()]
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if not pids:
                    break
                time.sleep(0.1)
        for started in self._started:
            started.kill()
            started.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        shutil.rmtree(self.root, ignore_errors=True)


def enter(fd: int) -> None:
    """This thread uses the network of a namespace."""
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def comm_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def requests(count: int, num_tokens: int) -> list[dict[str, Any]]:
    """Of several kinds: greedy, seeded, structured."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.8, "seed": 3}, {"temperature": 1, "seed": 4, "top_p": 0.9},
        {"temperature": 0.7, "seed": 5, "structured_outputs": {"regex": "[a-z ,.]{2000}"}},
    ]  # fmt: skip
    return [
        {
            "model": "leaf", "prompt": f"Story {number}: once upon a time there was", "stream": True, "logprobs": 1,
            "max_tokens": num_tokens, "ignore_eos": True, "stream_options": {"include_usage": True},
            **kinds[number % len(kinds)],
        }
        for number in range(count)
    ]  # fmt: skip


@dataclass(slots=True)
class Counts:
    """What became of the streams."""

    streams: int = 0
    wrong: int = 0
    lost: int = 0
    unreported: int = 0
    lines: list[str] = field(default_factory=list)


async def under_fault(
    port: int, expected: list[Any], bodies: list[dict[str, Any]], fault: Callable[[], Awaitable[None]], counts: Counts
) -> float:
    """Streams, a fault when all have begun, and the comparison; the longest wait within a stream after it."""
    exchanges = [Exchange() for _ in bodies]
    asking = [
        asyncio.ensure_future(ask(port, "/v1/completions", body, one))
        for body, one in zip(bodies, exchanges, strict=True)
    ]
    while not all(len(one.pieces) > 3 or task.done() for one, task in zip(exchanges, asking, strict=True)):
        await asyncio.sleep(0.02)
    moment = time.monotonic()
    await fault()
    await asyncio.gather(*asking)
    for wanted, one in zip(expected, exchanges, strict=True):
        counts.streams += 1
        counts.lost += not one.is_whole
        counts.wrong += one.is_whole and answer_of(one) != wanted
        if not one.is_whole:
            print("lost:", one.status, one.body[-300:], file=sys.stderr)
    return max((one.silence_after(moment) or 0.0 for one in exchanges), default=0.0)


class Cluster:
    """A server over the machines, and what is done to them."""

    def __init__(self, hosts: Hosts, cpus: tuple[int, int], *flags: str) -> None:
        self.hosts, self.cpus = hosts, cpus
        self.log = f"server{time.monotonic_ns()}"
        # A server of several machines answers on one of them.
        self.server = hosts.start(
            0, sys.executable, "-m", "quire", "serve", "leaf", "--port", "0", "--num-threads", "1", "--executor", "ray",
            "--max-restarts", "10", *flags, log=self.log,
        )  # fmt: skip
        self.port = int(hosts.wait_for(self.log, LISTENING)[1])

    async def kill_rank(self) -> None:
        os.kill(int(self.hosts.wait_for(self.log, PLACED)[1]), signal.SIGKILL)

    async def kill_core(self) -> None:
        for child in Path(f"/proc/{self._front()}/task").glob("*/children"):
            for pid in map(int, child.read_text().split()):
                if b"core_proc" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
                    return

    def _front(self) -> int:
        return self.server.pid  # each command before it has become the next

    async def kill_raylet(self) -> None:
        for pid in self.hosts.pids(1, "raylet"):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(3)
        await asyncio.to_thread(self.hosts.start_ray, 1, self.cpus[1])

    async def kill_own_raylet(self) -> None:
        """Ray's process on the machine of the server, which is the head of the cluster: Ray is started anew on both."""
        for pid in self.hosts.pids(0, "raylet"):
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(3)
        for host in (0, 1):
            for pid in self.hosts.pids(host, "gcs_server") + self.hosts.pids(host, "raylet"):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(3)
        for host in (0, 1):
            await asyncio.to_thread(self.hosts.start_ray, host, self.cpus[host])

    async def cut_network(self) -> None:
        self.hosts.cut(True)
        await asyncio.sleep(CUT_S)
        self.hosts.cut(False)

    def restarts(self) -> int:
        return self.hosts.text(self.log).count("the engine core failed")

    def stop(self) -> None:
        self.server.terminate()
        try:
            self.server.wait(30)
        except subprocess.TimeoutExpired:
            self.server.kill()


FAULTS = ("kill_rank", "kill_core", "kill_raylet", "cut_network", "kill_own_raylet")
SETUPS: dict[str, tuple[tuple[int, int], tuple[str, ...], tuple[str, ...]]] = {
    # CPUs of the machines, settings, faults. A core whose peers may be silent for 40 s x 0.75 waits for the network.
    "tensor parallel 2 across, waits for the network": (
        (1, 1), ("-tp", "2", "--hang-timeout-s", "40"), FAULTS,
    ),
    "tensor parallel 2 inside, pipeline parallel 2 across": (
        (2, 2), ("-tp", "2", "-pp", "2", "--hang-timeout-s", "40"), FAULTS,
    ),
    "tensor parallel 2 across, starts anew": ((1, 1), ("-tp", "2", "--hang-timeout-s", "6"), ("cut_network",)),
    "data parallel 2, one inside, one across": (
        (3, 1), ("-tp", "2", "-dp", "2", "--hang-timeout-s", "40"), ("kill_rank", "kill_core", "cut_network"),
    ),
}  # fmt: skip


async def try_setup(hosts: Hosts, name: str, expected: list[Any], bodies: list[dict[str, Any]], rounds: int) -> Counts:
    """All faults of one setup."""
    cpus, flags, faults = SETUPS[name]
    counts = Counts()
    for host in (0, 1):
        hosts.start_ray(host, cpus[host])
    cluster = Cluster(hosts, cpus, *flags)
    try:
        for fault in faults * rounds:
            before, seen = cluster.restarts(), len(SILENCE.findall(hosts.text(cluster.log)))
            longest = await under_fault(cluster.port, expected, bodies, getattr(cluster, fault), counts)
            silences = len(SILENCE.findall(hosts.text(cluster.log))) - seen
            counts.unreported += fault == "cut_network" and not silences
            print(
                f"{name}: {fault}: {counts.streams} streams so far, {counts.wrong} wrong, {counts.lost} lost, longest "
                f"wait {longest:.1f} s, {cluster.restarts() - before} restarts, {silences} reports of silence",
                flush=True,
            )
    finally:
        cluster.stop()
        if counts.lost or counts.wrong:
            print(hosts.text(cluster.log)[-6000:], file=sys.stderr)
    return counts


def main() -> None:
    """Every setup, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--only", default="", help="setups with this in their names")
    args = parser.parse_args()
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bodies = requests(args.streams, args.tokens)
    with ServerProcess() as alone:

        async def expect() -> list[Any]:
            return [answer_of(one) for one in [await ask(alone.port, "/v1/completions", body) for body in bodies]]

        expected = asyncio.run(expect())
    total = Counts()
    for name in SETUPS:
        if args.only not in name:
            continue
        hosts = Hosts()
        try:
            with hosts.on_first():
                counts = asyncio.run(try_setup(hosts, name, expected, bodies, args.rounds))
        finally:
            hosts.close()
        for number in ("streams", "wrong", "lost", "unreported"):
            setattr(total, number, getattr(total, number) + getattr(counts, number))
    print(f"{total.streams} streams, {total.unreported} silences not reported")
    print(f"{total.wrong + total.lost} answers wrong or lost")
    sys.exit(bool(total.wrong + total.lost + total.unreported or not total.streams))


if __name__ == "__main__":
    main()
