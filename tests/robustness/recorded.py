"""`make test-replay`: real serving over HTTP is recorded, and replayed without a model to the same schedule.

SECONDS=60 by default. The mixed load of `make soak`, and clients that leave in the middle, on so few pages that
requests are preempted, under every policy in turn. The last line is the number of recordings whose replay differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

from quire.flight_recorder.reader import read_recording
from quire.flight_recorder.replay import Replay, ReplayResult
from tests.robustness.http_streams import ask
from tests.robustness.server_process import ServerProcess
from tests.robustness.soak import random_request, soak

FLAGS = ("--max-num-seqs", "48", "--num-gpu-blocks-override", "80", "--disable-access-log")
POLICIES = {
    "fcfs": ("--swap-space", "0.1"),
    "priority": (),
    "fair": (),
    "shortest": ("--max-inter-token-latency-ms", "20"),
}
NUM_LEAVING = 4


async def leave_early(server: ServerProcess, deadline: float, seed: int) -> None:
    """Ask, and close the connection before the answer's end, again and again."""
    rng = random.Random(seed)
    while time.monotonic() < deadline:
        path, body = random_request(rng)
        body |= {"stream": True, "max_tokens": 200}
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(ask(server.port, path, body), rng.uniform(0.05, 0.5))


async def serve(server: ServerProcess, seconds: float) -> int:
    """Serve for so long; the number of requests whose clients stayed."""
    deadline = time.monotonic() + seconds
    leaving = [asyncio.ensure_future(leave_early(server, deadline, seed)) for seed in range(NUM_LEAVING)]
    course = await soak(server, lambda _: time.monotonic() < deadline)
    await asyncio.gather(*leaving)
    if course.wrong:
        raise AssertionError(f"{len(course.wrong)} answers were not whole: {course.wrong[0]}")
    return course.num_requests


def record(policy: str, seconds: float) -> ReplayResult:
    """Serve under a policy, stop the server, and replay."""
    with tempfile.TemporaryDirectory() as directory:
        flags = (*FLAGS, "--scheduling-policy", policy, *POLICIES[policy], "--flight-recorder", directory)
        with ServerProcess(*flags) as server:
            asyncio.run(serve(server, seconds))
        return Replay(read_recording(Path(directory))).run()


def main() -> int:
    """Exit code 0 when every schedule was the same."""
    parser = argparse.ArgumentParser(prog="make test-replay")
    parser.add_argument("--seconds", type=float, default=60.0, help="under each policy")
    parser.add_argument("--policies", nargs="+", choices=sorted(POLICIES), default=list(POLICIES))
    arguments = parser.parse_args()
    num_different = 0
    for policy in arguments.policies:
        result = record(policy, arguments.seconds)
        watch = result.watch
        outcome = "identical" if result.first_difference is None else f"differs: {result.first_difference}"
        seconds = watch.now_s - (watch.start_s or 0.0)
        print(
            f"{policy}: {watch.num_steps} steps, {len(watch.timelines)} requests, {watch.num_preemptions} preemptions, "
            f"{seconds:.1f} s; {outcome}",
            flush=True,
        )
        num_different += result.first_difference is not None
    print(f"recordings whose replay differs: {num_different} of {len(arguments.policies)}")
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
