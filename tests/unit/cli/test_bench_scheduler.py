from __future__ import annotations

import json

import pytest

from quire.cli.bench_scheduler import POLICIES
from quire.cli.main import main


@pytest.mark.parametrize("policy", POLICIES)
def test_the_benchmark_measures_every_size_and_ends_in_one_json_object(capsys, policy):
    sizes = ["--num-reqs", "4", "8", "--prompt-len", "40", "--steps", "3"]
    assert main(["bench", "scheduler", "--policy", policy, *sizes]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert [result["num_reqs"] for result in report["results"]] == [4, 8]
    for result in report["results"]:
        assert 0 < result["decode_step_us"] <= result["decode_step_p99_us"]
        assert result["add_us"] > 0 and result["prefill_us"] > 0
    assert report["scaling"] > 0 and report["policy"] == policy
