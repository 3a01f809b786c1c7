"""Inside a real memory cgroup the engine sizes itself to the limit: it is never killed, and says what it chose."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.effort import effort

MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup")
PROGRAM = """
import json, os, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from quire import LLM, SamplingParams
from quire.errors import NotEnoughMemoryError
try:
    llm = LLM("leaf", max_num_seqs=64, **json.loads(sys.argv[2]))
except NotEnoughMemoryError as error:
    sys.exit(f"refused: {error}")
prompts = [{"prompt_token_ids": [300 + i] * 1000} for i in range(12)]
outputs = llm.generate(prompts, SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, logprobs=5, ignore_eos=True))
assert all(len(output.outputs[0].token_ids) == 8 for output in outputs)
"""


@pytest.fixture
def limited_run() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run PROGRAM in a memory cgroup of so many bytes, with further settings."""
    is_v2 = (CGROUP / "cgroup.controllers").exists()
    group = (CGROUP if is_v2 else CGROUP / "memory") / f"quire-test-{uuid.uuid4().hex[:8]}"
    limit_file = group / ("memory.max" if is_v2 else "memory.limit_in_bytes")
    try:
        group.mkdir()
        limit_file.write_text(str(MIB * 4096))
    except OSError as cause:
        if group.exists():
            group.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {cause}")

    def run(num_bytes: int, **settings: object) -> subprocess.CompletedProcess[str]:
        limit_file.write_text(str(num_bytes))
        command = [sys.executable, "-c", PROGRAM, str(group / "cgroup.procs"), json.dumps(settings)]
        env = {**os.environ, "QUIRE_LOG_LEVEL": "INFO", "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)

    yield run
    group.rmdir()


@pytest.mark.parametrize("limit_mib", effort([1024], [1024, 1536]))
def test_a_limit_is_kept_and_explained(limited_run, limit_mib):
    done = limited_run(limit_mib * MIB)
    assert done.returncode == 0, done.stderr
    assert "memory for the KV cache: " in done.stderr


def test_a_step_too_large_for_the_limit_is_refused_with_the_numbers(limited_run):
    done = limited_run(1024 * MIB, max_num_batched_tokens=131072)
    assert done.returncode == 1 and "refused:" in done.stderr, (done.returncode, done.stderr)
    assert "hint:" in done.stderr
