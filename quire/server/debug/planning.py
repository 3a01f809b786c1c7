"""Planner: sizes a deployment with `quire plan`, in a process of its own at a low priority, one at a time.

Called by the route of `/debug/plan`. The simulation computes for seconds; in this process it would take turns with the
streams of running answers.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from typing import Annotated, Any

import msgspec

from quire.errors import ValidationError, unknown_name
from quire.server.http.errors import OVERLOADED, TIMEOUT, ApiError
from quire.simulator.hardware import HARDWARE
from quire.simulator.interconnect import INTERCONNECTS
from quire.utils.children import Child, describe_exit, start_module

MAX_SECONDS = 120.0
MAX_OUTPUT_BYTES = 4 << 20
NICENESS = 10

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]


class PlanRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What is asked: flags of `quire plan` by name, with bounds that keep a simulation short.

    Attributes:
        hardware: one of `quire plan`'s; rate: requests per second; slo_*: milliseconds, None = no objective.
        interconnect, stage_interconnect: names of `quire plan`'s; None = the hardware's own links.
        find_replicas: look for the number of replicas that meets the objectives.
    """

    hardware: str
    model: str | None = None
    rate: Annotated[float, msgspec.Meta(gt=0.0, le=1e5)] = 1.0
    prompt_tokens: Count = 512
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 128
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    num_requests: Annotated[int, msgspec.Meta(ge=10, le=2000)] = 300
    replicas: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    pipeline_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    enable_expert_parallel: bool = False
    interconnect: str | None = None
    stage_interconnect: str | None = None
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] | None = None
    slo_ttft: Seconds | None = None
    slo_itl: Seconds | None = None
    find_replicas: bool = False


class Planner:
    """Runs one simulation at a time."""

    def __init__(self) -> None:
        self._is_busy = False

    async def plan(self, asked: PlanRequest, model_path: str) -> dict[str, Any]:
        """What `quire plan` prints as its last line.

        Raises:
            ValidationError: it does not take these values; says why.
            ApiError: another simulation runs, or this one takes too long.
        """
        if asked.hardware.lower() not in HARDWARE:
            names = [one.name for one in HARDWARE.values()]
            raise unknown_name("hardware", asked.hardware, names, ValidationError, field="hardware")
        for field in ("interconnect", "stage_interconnect"):
            name = getattr(asked, field)
            if name is not None and name not in INTERCONNECTS:  # a path would be read by the server
                raise unknown_name("interconnect", name, INTERCONNECTS, ValidationError, field=field)
        if self._is_busy:
            raise ApiError(OVERLOADED, "another simulation is running", retry_after_s=5)
        self._is_busy = True
        try:
            return await self._run(_arguments(asked, model_path))
        finally:
            self._is_busy = False

    async def _run(self, arguments: list[str]) -> dict[str, Any]:
        process = start_module(
            "quire.cli.main", "plan", *arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        _yield_to_others(process.pid)
        try:
            out, err = await asyncio.to_thread(_wait, process)
        finally:
            process.kill()  # which ends the thread that waits for it, too; harmless when it has ended
        if process.returncode:
            message = err.decode(errors="replace").strip().removeprefix("error: ")
            raise ValidationError(f"quire plan: {message[-1000:] or describe_exit(process.returncode)}")
        answer: dict[str, Any] = msgspec.json.decode(out[-MAX_OUTPUT_BYTES:].strip().rpartition(b"\n")[2])
        return answer


def _wait(process: Child) -> tuple[bytes, bytes]:
    """What a process wrote, once it has ended; one that takes too long is ended."""
    with process:
        try:
            return process.communicate(timeout=MAX_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ApiError(TIMEOUT, f"the simulation took more than {MAX_SECONDS:g} s: ask for less") from None


def _yield_to_others(pid: int) -> None:
    """Leave most of the CPU to the engine where that wants it."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    except ProcessLookupError:
        return  # it has ended already, and its answer says why


def _arguments(asked: PlanRequest, model_path: str) -> list[str]:
    arguments = ["--model", model_path]
    for name in msgspec.structs.asdict(asked):
        value = getattr(asked, name)
        if name == "model" or value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if value is not True:
            arguments.append(str(value))
    return arguments
