"""One trace for all ranks of an engine: tensor and pipeline parallel, whole experts, replicas; the same tokens."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.replica_traces import merge_traces
from tests.models.families.cases import CASES
from tests.parallel.ranks import ranks_as_threads

PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
PROMPTS: list[Any] = [{"prompt_token_ids": list(range(5, 30))}, {"prompt_token_ids": [7, 8, 9]}]


def token_ids(llm: LLM) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def trace(folder: Path) -> list[dict[str, Any]]:
    """The events of the only file."""
    (file,) = folder.iterdir()
    return list(json.loads(file.read_text())["traceEvents"])


def by_rank(events: list[dict[str, Any]], name: str) -> Counter[int]:
    return Counter(one["pid"] for one in events if one["name"] == name)


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "family", "product"),
    [(2, 2, "leaf", "linear"), (2, 1, "mixtral", "grouped_linear")],
    ids=["TP 2, PP 2", "EP 2"],
)
def test_a_trace_has_the_steps_and_kernels_of_each_rank(
    num_ranks: int, num_stages: int, family: str, product: str, tmp_path: Path
):
    model, settings = "leaf", {}
    if family != "leaf":
        model, settings = str(tmp_path / family), {"dtype": "bfloat16", "enable_expert_parallel": True}
        CASES[family].write(tmp_path / family)
    folder = tmp_path / "profiles"
    with ranks_as_threads(), LLM(
        model, max_model_len=128, max_num_seqs=2, enable_prefix_caching=False, profile=str(folder), num_threads=1,
        tensor_parallel_size=num_ranks, pipeline_parallel_size=num_stages, **settings,
    ) as llm:  # fmt: skip
        expected = token_ids(llm)
        for _ in range(2):  # another one can follow
            llm.start_profile()
            assert token_ids(llm) == expected
            llm.stop_profile()
            events = trace(folder)
            next(folder.iterdir()).unlink()
        assert token_ids(llm) == expected and not list(folder.iterdir())
    ranks = range(1, 1 + num_ranks * num_stages)
    names = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert {pid: name.split(" (")[0] for pid, name in names.items()} == {pid: f"rank {pid - 1}" for pid in ranks}
    (num_steps,) = set(by_rank(events, "step: forward").values())  # with stages, a request's step after the other's
    assert set(by_rank(events, "step: forward")) == set(ranks) and num_steps == (11 if num_stages > 1 else 6)
    assert by_rank(events, "step: sample") == {1: num_steps}
    num_products = by_rank(events, product)
    assert set(num_products) == set(ranks) and min(num_products.values()) >= 6
    begin, end = (side([one["ts"] for one in events if one["name"] == "step: forward"]) for side in (min, max))
    inside = [begin - 1 <= one["ts"] <= end + 10e6 for one in events if one["ph"] == "X"]
    assert all(inside), "of one clock"


def test_traces_of_replicas_become_one(tmp_path: Path):
    files = {}
    for index in (0, 1):
        files[index] = tmp_path / f"20261124-000000-{10 + index}-3-steps.json"
        events = [
            {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rank 0 (process 4)"}},
            {"ph": "X", "pid": 2, "tid": 1, "name": "step: forward", "ts": 1.5, "dur": 2.0, "args": {}},
        ]
        files[index].write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))
    merge_traces(files)
    found = trace(tmp_path)
    assert [one["pid"] for one in found] == [1, 2, 1001, 1002]
    assert [one["args"].get("name") for one in found[::2]] == [f"replica {i} rank 0 (process 4)" for i in (0, 1)]
    assert merge_traces({}) is None
