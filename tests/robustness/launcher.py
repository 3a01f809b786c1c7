"""Ranks that a launcher has started, as real processes: answers of one process, ends noticed at once.

`make test-launcher`. torchrun, plain variables, replicas and, as root, two machines that are network namespaces; then
ranks are killed while all generate. The last line is the number of scripts that got something else, or too late.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.robustness.ray_hosts import ADDRESSES, Hosts
from tests.robustness.server_process import ROOT

NOTICED_S = 1.0
START_S = 300.0
SIZES: dict[str, dict[str, int]] = {
    "tensor parallel 2": {"tensor_parallel_size": 2},
    "pipeline parallel 2": {"pipeline_parallel_size": 2},
    "tensor parallel 2, pipeline parallel 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "data parallel 2": {"data_parallel_size": 2},
}


def script(sizes: dict[str, int], forever: bool) -> None:
    """What every rank runs; says what it got, one line of JSON each."""
    from quire import LLM, SamplingParams
    from quire.errors import QuireError

    def say(**values: Any) -> None:
        line = json.dumps({"rank": int(os.environ.get("RANK", -1)), "at": time.time(), **values})
        sys.stdout.write(f"{line}\n")  # at once: ranks that torchrun starts share a file
        sys.stdout.flush()

    extra = {"distributed_executor_backend": "external_launcher", **sizes} if sizes else {}
    kinds: list[dict[str, Any]] = [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 0, "max_tokens": 40},
                                   {"seed": 3, "stop": ["and"]}]  # fmt: skip
    params = [SamplingParams(**{"max_tokens": 24, "logprobs": 2, **kinds[number % 3]}) for number in range(12)]
    prompts = [f"Story {number}: once upon a time there was" for number in range(12)]
    try:
        llm = LLM("leaf", num_threads=1, max_model_len=512, max_num_seqs=8, **extra)
        while True:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found = [(one.outputs[0].text, one.outputs[0].cumulative_logprob) for one in outputs]
            say(digest=hashlib.sha256(repr(found).encode()).hexdigest())
            if not forever:
                break
        import torch.distributed as dist

        say(world=dist.get_rank() if sizes else -1)
    except QuireError as error:
        say(error=error.message)


class Ranks:
    """The processes of one launch; `close` leaves none of them."""

    def __init__(
        self, sizes: dict[str, int], *, forever: bool = False, hosts: Hosts | None = None, torchrun: bool = False
    ) -> None:
        self._files: list[Path] = []
        self._directory = tempfile.TemporaryDirectory()
        count = 1
        for size in sizes.values():
            count *= size
        program = ["-m", "tests.robustness.launcher", "--script", json.dumps(sizes), *(["--forever"] * forever)]
        self.started: list[subprocess.Popen[bytes]] = []
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
            self._start([*command, *program], {})
            return
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        for rank in range(count):
            address = "127.0.0.1" if hosts is None else ADDRESSES[0]
            place = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": "0"}
            inside = [] if hosts is None else ["ip", "netns", "exec", hosts.names[rank % 2]]
            inside += [] if hosts is None else ["unshare", "-pf", "--mount-proc"]  # a machine has processes of its own
            self._start([*inside, sys.executable, *program], {**place, "WORLD_SIZE": str(count)})

    def _start(self, command: Sequence[str], variables: dict[str, str]) -> None:
        self._files.append(Path(self._directory.name) / f"{len(self._files)}.out")
        with self._files[-1].open("wb") as output:
            self.started.append(subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **variables}, stdout=output, stdin=subprocess.DEVNULL,
                start_new_session=True,
            ))  # fmt: skip

    def said(self) -> list[dict[str, Any]]:
        """Every whole line of every rank so far."""
        lines = [line for file in self._files for line in file.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}\n")]

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Until it is so."""
        deadline = time.monotonic() + START_S
        while not is_done():
            if time.monotonic() > deadline:
                raise SystemExit(f"not done within {START_S} s: {self.said()[-4:]}")
            time.sleep(0.05)

    def end(self) -> list[dict[str, Any]]:
        """What all said, once all have ended."""
        self.wait(lambda: all(one.poll() is not None for one in self.started))
        return self.said()

    def close(self) -> None:
        for one in self.started:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
        self._directory.cleanup()


def answered(name: str, expected: str, **options: Any) -> int:
    """Scripts of a launch that did not get the answers of one process."""
    sizes = SIZES[name]
    ranks = Ranks(sizes, **options)
    try:
        said = ranks.end()
    finally:
        ranks.close()
    count = max(1, len({one["rank"] for one in said}))
    right = sum(one.get("digest") == expected for one in said)
    worlds = sorted(one["world"] for one in said if "world" in one)
    wanted = 4 if len(sizes) == 2 else 2
    wrong = wanted - right + (worlds != list(range(wanted)))
    print(f"{name}{options or ''}: {right} of {wanted} scripts got the answers of one process", flush=True)
    if wrong:
        print(count, said, file=sys.stderr)
    return wrong


def killed(victim: int, **options: Any) -> int:
    """Kill a rank while all generate: whether each of the others says which, and how soon."""
    ranks = Ranks({"tensor_parallel_size": 2}, forever=True, **options)
    try:
        ranks.wait(lambda: len([one for one in ranks.said() if "digest" in one]) >= 4)
        at = time.time()
        os.killpg(ranks.started[victim].pid, signal.SIGKILL)
        ranks.wait(lambda: any("error" in one for one in ranks.said()) or ranks.started[1 - victim].poll() is not None)
        errors = [one for one in ranks.said() if "error" in one]
    finally:
        ranks.close()
    wrong = len(errors) != 1 or f"rank {victim}" not in errors[0]["error"] or errors[0]["at"] - at > NOTICED_S
    took = f"{errors[0]['at'] - at:.2f} s: {errors[0]['error']}" if errors else "not at all"
    print(f"rank {victim} killed {'on another machine' * bool(options)}: the other noticed after {took}", flush=True)
    return int(wrong)


def main() -> None:
    """Everything, and the sum."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--script", default=None, help="be a rank's script, with these sizes")
    parser.add_argument("--forever", action="store_true")
    args = parser.parse_args()
    if args.script is not None:
        return script(json.loads(args.script), args.forever)
    os.environ.pop("RANK", None)
    alone = Ranks({})
    expected = alone.end()[0]["digest"]
    alone.close()
    wrong = answered("tensor parallel 2", expected, torchrun=True)
    wrong += sum(answered(name, expected) for name in SIZES)
    wrong += sum(killed(victim) for victim in (0, 1))
    if os.geteuid() == 0:
        hosts = Hosts()
        try:
            wrong += answered("tensor parallel 2", expected, hosts=hosts)
            wrong += sum(killed(victim, hosts=hosts) for victim in (0, 1))
        finally:
            hosts.close()
    print(f"{wrong} scripts got something else, or too late")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
