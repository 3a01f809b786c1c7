from __future__ import annotations

import json

from quire.entrypoints.cli.main import main


def test_the_benchmark_measures_every_size_and_ends_in_one_json_object(capsys):
    assert main(["bench", "scheduler", "--num-reqs", "4", "8", "--prompt-len", "40", "--steps", "3"]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    report = json.loads(lines[-1])
    assert [result["num_reqs"] for result in report["results"]] == [4, 8]
    for result in report["results"]:
        assert 0 < result["decode_step_us"] <= result["decode_step_p99_us"]
        assert result["add_us"] > 0 and result["prefill_us"] > 0
    assert report["scaling"] > 0
