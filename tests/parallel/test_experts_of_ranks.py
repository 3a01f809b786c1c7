"""Whole experts on ranks: answers are the bytes of one process, and a rank has, and reads, its experts alone."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM
from quire.layers.native import PackedRows
from quire.layers.placed_experts import PlacedExperts
from tests.effort import effort
from tests.models.families.cases import CASES
from tests.parallel.circumstances import SETTINGS, WHOLE, WHOLE_EXPERTS, answers
from tests.parallel.ranks import ranks_as_threads


@pytest.mark.parametrize(
    ("family", "num_ranks", "name"),
    effort(
        (("gpt_oss", 2, "experts in turns, swapped, with suffixes"), ("deepseek_v3", 2, "whole experts")),
        (("mixtral", 4, "whole experts"), ("llama4", 2, "whole experts, call by call")),
    ),
)
def test_answers_are_those_of_one_process(tmp_path: Path, family: str, num_ranks: int, name: str):
    CASES[family].write(tmp_path)
    assert answers(tmp_path, 320, num_ranks, **WHOLE_EXPERTS[name]) == answers(tmp_path, 320, 1)


def test_experts_are_placed_as_a_file_says_and_a_rank_reads_and_keeps_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    CASES["mixtral"].write(tmp_path / "model")
    (tmp_path / "ranks.json").write_text("[1, 0, 1, 1, 0, 1]")
    num_read: Counter[int] = Counter()
    num_bytes: Counter[int] = Counter()
    load, create_weights = PackedRows.load, PlacedExperts.create_weights

    def reading(self: PackedRows, tensor: torch.Tensor) -> bool:
        num_read[threading.get_ident()] += tensor.numel()
        return load(self, tensor)

    def creating(self: PlacedExperts, layer: Any, *args: Any) -> None:
        create_weights(self, layer, *args)
        num_bytes[self.rank] += sum(one.nbytes for one in layer.own.buffers())

    monkeypatch.setattr(PackedRows, "load", reading)
    monkeypatch.setattr(PlacedExperts, "create_weights", creating)
    settings = {**WHOLE, "expert_placement_strategy": str(tmp_path / "ranks.json"), "tensor_parallel_size": 2}
    with (
        ranks_as_threads(),
        LLM(str(tmp_path / "model"), load_format="safetensors", packing_cache=False, **{**SETTINGS, **settings}),
    ):
        pass
    config = json.loads((tmp_path / "model/config.json").read_text())
    expert = 3 * config["hidden_size"] * config["intermediate_size"] * config["num_hidden_layers"]
    assert num_bytes[1] == 2 * num_bytes[0] > 0
    other, this = sorted(num_read.values())
    assert this - other == 2 * expert
