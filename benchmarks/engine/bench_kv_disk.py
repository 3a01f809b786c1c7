"""Blocks of the KV cache kept on a disk and in host memory: what they save after a restart, and what they cost.

    python -m benchmarks.engine.bench_kv_disk --model DIR                 # time to the first token of a long prompt
    python -m benchmarks.engine.bench_kv_disk --model DIR --throughput    # 64 requests, with and without a cold disk

The first computes the prompt once, forgets the cache and loads it from host memory, is killed by SIGKILL, and is
followed by a process that loads it from the disk, while a second one beside it does the same. The last line is one JSON
object. Children print one line each.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

VOCAB_SIZE = 30000
STORED_WITHIN_S = 120.0


def make_llm(args: argparse.Namespace, **settings: Any) -> LLM:
    return LLM(
        args.model, load_format=args.load_format, skip_tokenizer_init=True, max_model_len=args.prompt_len + 64,
        speculative_config="off", **settings,
    )  # fmt: skip


def prompt_of(length: int, seed: int) -> dict[str, list[int]]:
    rng = random.Random(seed)
    return {"prompt_token_ids": [rng.randrange(5, VOCAB_SIZE) for _ in range(length)]}


def first_token(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds until the prompt's first token, the token, and how many tokens of the prompt were not computed."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    begun = time.perf_counter()
    output = llm.generate(prompt_of(args.prompt_len, 1), params, use_tqdm=False)[0]
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "token": output.outputs[0].token_ids[0], "cached": output.num_cached_tokens}


def child(args: argparse.Namespace) -> None:
    """One process: the prompt, and once more from host memory if there is any; then it waits to be killed."""
    host = {"kv_offloading_size": 2.0} if args.role == "cold" else {}
    llm = make_llm(args, kv_disk=args.kv_disk, max_num_seqs=4, **host)
    results = [first_token(llm, args)]
    if host:
        assert llm.llm_engine.reset_prefix_cache(), "a block is in use"
        results.append(first_token(llm, args))
    print(json.dumps(results), flush=True)
    sys.stdin.read()


def start(args: argparse.Namespace, role: str, directory: str) -> subprocess.Popen[str]:
    command = [
        sys.executable, "-m", "benchmarks.engine.bench_kv_disk", "--model", args.model, "--role", role, "--kv-disk",
        directory, "--prompt-len", str(args.prompt_len), "--load-format", args.load_format,
    ]  # fmt: skip
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def results_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a process ended early"
    results: list[dict[str, Any]] = json.loads(line)
    return results


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def wait_until_stored(directory: Path) -> tuple[int, int]:
    """Files and bytes in the directory, once there have been no new ones for a second."""
    before, end = -1, time.monotonic() + STORED_WITHIN_S
    while time.monotonic() < end:
        files = list(directory.rglob("*.kv"))
        if files and len(files) == before:
            break
        before = len(files)
        time.sleep(1.0)
    return len(files), sum(path.stat().st_size for path in files)


def measure_first_tokens(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        process = start(args, "cold", directory)
        cold, host = results_of(process)
        num_files, num_bytes = wait_until_stored(Path(directory))
        kill(process)
        restarted = start(args, "warm", directory)
        disk = results_of(restarted)[0]
        beside = start(args, "warm", directory)  # while the other still runs
        replica = results_of(beside)[0]
        kill(restarted)
        kill(beside)
    assert cold["token"] == host["token"] == disk["token"] == replica["token"], "the answers differ"
    assert cold["cached"] == 0 < min(host["cached"], disk["cached"], replica["cached"])
    return {
        "prompt_len": args.prompt_len, "cold_s": cold["seconds"], "host_s": host["seconds"], "disk_s": disk["seconds"],
        "replica_s": replica["seconds"], "host_share": host["seconds"] / cold["seconds"],
        "disk_share": disk["seconds"] / cold["seconds"], "replica_share": replica["seconds"] / cold["seconds"],
        "files": num_files, "bytes": num_bytes,
    }  # fmt: skip


def measure_throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of 64 requests that are all different, in turn without and with an empty disk."""
    seconds: dict[str, list[float]] = {"off": [], "disk": []}
    rng = random.Random(2)
    for round_number in range(args.rounds):
        prompts = [prompt_of(args.request_len, rng.randrange(1 << 30)) for _ in range(64)]
        lengths = [8 + 48 * number // 64 for number in range(64)]
        params = [SamplingParams(max_tokens=one, temperature=0.0, ignore_eos=True, detokenize=False) for one in lengths]
        for name in ("off", "disk") if round_number % 2 else ("disk", "off"):
            with tempfile.TemporaryDirectory(dir=args.directory) as directory:
                settings = {"kv_disk": directory} if name == "disk" else {}
                llm = make_llm(args, max_num_seqs=64, **settings)
                begun = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                seconds[name].append(time.perf_counter() - begun)
                llm.shutdown()
                print(name, round(seconds[name][-1], 3), len(list(Path(directory).rglob("*.kv"))), flush=True)
    off, disk = (statistics.median(seconds[name]) for name in ("off", "disk"))
    return {"off_s": off, "disk_s": disk, "ratio": disk / off, "rounds": args.rounds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt-len", type=int, default=8000)
    parser.add_argument("--request-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", help="where the disk is measured; default: that of temporary files")
    parser.add_argument("--throughput", action="store_true")
    parser.add_argument("--role", choices=("cold", "warm"), help=argparse.SUPPRESS)
    parser.add_argument("--kv-disk", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        child(args)
        return 0
    measured = measure_throughput(args) if args.throughput else measure_first_tokens(args)
    print(json.dumps({name: round(one, 4) if isinstance(one, float) else one for name, one in measured.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
