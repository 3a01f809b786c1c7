"""What one tenant can do to another's tokens: attacks on a server, and how its neighbour fares meanwhile.

A server on the embedded model with a key file: alice may send two requests a minute, mallory any number, bob is the
neighbour. Bob reads one stream of tokens and sends short chats; a process of its own measures both. Each attack runs
in a process at low priority (nice 10), so that what is measured is what the server lets it do. For each: the time
between bob's tokens (p50, p99, max), the time of a chat (p50), quiet and during the attack, and the server's resident
memory before and after where memory is attacked. Before memory is attacked, an ordinary tenant's long prompts have
been there (requests of 26 KB to /tokenize): what a server loads and starts for its first one is not an attack's.
Targets: p99 at most twice that of quiet, max below 250 ms, chats at most twice, memory back within 5%; in the flood
of schemas p99 at most 1.2 times. Every attack has a quiet measurement of its own before it, so that a machine that
becomes slower is not taken for an attack, and a server of its own where memory is attacked. Flags that are not its
own go to `quire serve`. What misses its target is listed; the last line is one JSON object.

    python -m benchmarks.server.bench_neighbours
    python -m benchmarks.server.bench_neighbours --only tokenize-32 members --seconds 6
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.server.bench_overhead import start_server
from benchmarks.server.neighbour_attacks import ATTACKS, open_request

KEYS = """tenants:
  alice: {keys: [key-of-alice], requests_per_minute: 2}
  mallory: {keys: [key-of-mallory]}
  bob: {keys: [key-of-bob]}
"""
MAX_MS, MOST_TIMES, MOST_TIMES_OF_SCHEMAS, MOST_GROWTH = 250.0, 2.0, 1.2, 1.05
SETTLE_S, GIVE_BACK_S = 2.0, 20.0
ORDINARY_PROMPT, NUM_ORDINARY = "hello world. " * 2000, 20


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def start_meter(port: int, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.server.neighbour_meter", str(port), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def start_attack(name: str, port: int, seconds: float) -> subprocess.Popen[str]:
    command = ["nice", "-n", "10", sys.executable, "-m", "benchmarks.server.neighbour_attacks", name, str(port)]
    return subprocess.Popen([*command, str(seconds)], stdout=subprocess.PIPE, text=True)


def result_of(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate()
    return json.loads(out.splitlines()[-1])


async def send_ordinary(port: int) -> None:
    """Long prompts, one after another, of a tenant that attacks nobody."""
    for _ in range(NUM_ORDINARY):
        reader, writer = await open_request(port, "/tokenize", {"prompt": ORDINARY_PROMPT}, "key-of-bob")
        answer = await reader.read()
        assert b" 200 " in answer[:20], answer[:200]
        writer.close()


def measure(name: str, port: int, pid: int, seconds: float) -> dict[str, Any]:
    """One attack, with the meter beside it, and what is left of it in memory."""
    before = resident_mib(pid)
    attack = start_attack(name, port, seconds + SETTLE_S)
    assert attack.stdout is not None and attack.stdout.readline() == "ready\n"
    time.sleep(SETTLE_S)
    figures = result_of(start_meter(port, seconds))
    figures["peak_mib"] = resident_mib(pid)
    figures["attack"] = result_of(attack)
    deadline = time.monotonic() + (GIVE_BACK_S if ATTACKS[name].is_about_memory else SETTLE_S)
    while (after := resident_mib(pid)) > MOST_GROWTH * before and time.monotonic() < deadline:
        time.sleep(0.5)
    return {**figures, "before_mib": before, "after_mib": after}


def held(name: str, figures: dict[str, Any], quiet: dict[str, Any]) -> list[str]:
    """The targets that `figures` miss."""
    missed = []
    if figures["itl_p99_ms"] > most_times(name) * quiet["itl_p99_ms"]:
        missed.append("itl_p99")
    if figures["itl_max_ms"] > MAX_MS:
        missed.append("itl_max")
    if figures["chat_p50_ms"] > MOST_TIMES * quiet["chat_p50_ms"]:
        missed.append("chat_p50")
    if ATTACKS[name].is_about_memory and figures["after_mib"] > MOST_GROWTH * figures["before_mib"]:
        missed.append("memory")
    return missed


def most_times(name: str) -> float:
    """Times its quiet value that p99 between tokens may have."""
    return MOST_TIMES_OF_SCHEMAS if name == "compile-schemas" else MOST_TIMES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--quiet-seconds", type=float, default=4.0, help="of the quiet one before it")
    args, flags = parser.parse_known_args()
    results: dict[str, Any] = {}
    about_memory = [name for name in args.only if ATTACKS[name].is_about_memory]
    together = [name for name in args.only if name not in about_memory]
    with tempfile.TemporaryDirectory() as directory:
        keys = Path(directory) / "keys.yaml"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        for names in [together, *([name] for name in about_memory)]:
            if names:
                results |= run_on_one_server(names, ["--api-key-file", str(keys), *flags], args)
    missed = {name: figures["missed"] for name, figures in results.items() if figures["missed"]}
    for name, targets in missed.items():
        print(f"missed by {name}: {', '.join(targets)}")
    print(json.dumps({"attacks": results, "missed": sum(map(len, missed.values()))}))


def run_on_one_server(names: list[str], flags: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """The figures of some attacks, one after the other, each with its quiet ones."""
    results: dict[str, Any] = {}
    server, port, _ = start_server("leaf", flags)
    try:
        result_of(start_meter(port, 2.0))  # warm-up
        asyncio.run(send_ordinary(port))
        for name in names:
            quiet = result_of(start_meter(port, args.quiet_seconds))
            print(f"{'quiet':22}", line(quiet), flush=True)
            figures = measure(name, port, server.pid, args.seconds)
            results[name] = {**figures, "quiet": quiet, "missed": held(name, figures, quiet)}
            print(f"{name:22}", line(figures), "missed: " + ", ".join(results[name]["missed"] or ["-"]), flush=True)
    finally:
        server.terminate()
        server.communicate()
    return results


def line(figures: dict[str, Any]) -> str:
    text = "itl p50 {itl_p50_ms:.1f} p99 {itl_p99_ms:.1f} max {itl_max_ms:.0f} ms, chat p50 {chat_p50_ms:.1f} ms"
    if "after_mib" in figures:
        text += ", {before_mib:.0f} -> {peak_mib:.0f} -> {after_mib:.0f} MiB, {attack}"
    return text.format(**figures)


if __name__ == "__main__":
    main()
