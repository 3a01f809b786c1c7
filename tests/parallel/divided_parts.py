"""The parts of the engine that are configured, each beside every division of a model over processes.

`test_divided_parts` tries a cell: its answers are those of one process, or it is refused. `tests.matrix.table` puts the
table on the page of the matrix.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.models.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.models.heads import make_eagle, make_eagle3, make_medusa
from tests.parallel.circumstances import PREEMPTED

DIVISIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "tensor": ("`-tp 2`", {"num_ranks": 2}),
    "pipeline": ("`-pp 2`", {"num_ranks": 1, "num_stages": 2}),
    "both": ("`-tp 2 -pp 2`", {"num_ranks": 2, "num_stages": 2}),
    "experts": ("`-tp 2 --enable-expert-parallel`", {"num_ranks": 2, "enable_expert_parallel": True}),
}
"""Name -> title, and arguments of `circumstances.answers`."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        settings: given a directory for what it writes and the model's, of the engine with several processes.
        changes_bytes: one process is given the settings, too.
    """

    title: str
    settings: Callable[[Path, Path], Mapping[str, Any]]
    changes_bytes: bool = False


def _drafts(method: str, **fields: Any) -> Callable[[Path, Path], Mapping[str, Any]]:
    if method == "suffix":
        return lambda *_: {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
    fields |= {"method": method, "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    return lambda _, model: {"speculative_config": {**fields, "model": str(model / fields["method"])}}


BFLOAT16: Mapping[str, Any] = {"dtype": "bfloat16"}
TREE = "[(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]"
RETURNING: Mapping[str, Any] = {**PREEMPTED, "enable_prefix_caching": True}
SWAPPED: Mapping[str, Any] = {**PREEMPTED, "preemption_mode": "swap", "swap_space": 0.05}
PARTS: Mapping[str, Part] = {
    "captured": Part("steps captured", lambda *_: {}),
    "eager": Part("`enforce_eager`", lambda *_: {"enforce_eager": True}),
    "chunks": Part("prompts in chunks", lambda *_: {"max_num_batched_tokens": 8}),
    "preempted": Part("preempted, computed again", lambda *_: PREEMPTED),
    "swapped": Part("preempted, `swap_space`", lambda *_: SWAPPED),
    "memory": Part("`kv_offloading_size`", lambda *_: {**RETURNING, "kv_offloading_size": 0.05}),
    "disk": Part("`kv_disk`", lambda path, _: {**RETURNING, "kv_disk": str(path)}),
    "connector": Part(
        "a connector that works on blocks",
        lambda path, _: {"kv_transfer_config": {
            "kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(path)},
        }},
    ),
    "hooks": Part(
        "a connector that is called around layers",
        lambda *_: {"kv_transfer_config": {
            "kv_connector": "HookedConnector", "kv_connector_module_path": "tests.parallel.test_blocks_of_ranks",
        }},
    ),
    "suffix": Part("drafts: suffixes", _drafts("suffix")),
    "draft_model": Part("drafts: a draft model", _drafts("draft_model")),
    "eagle": Part("drafts: EAGLE", _drafts("eagle")),
    "eagle3": Part("drafts: EAGLE-3", _drafts("eagle3")),
    "medusa": Part("drafts: Medusa", _drafts("medusa")),
    "trees": Part("drafts: trees", _drafts("medusa", speculative_token_tree=TREE)),
    "eagle_trees": Part("drafts: trees of EAGLE", _drafts("eagle", speculative_token_tree=TREE)),
    "int8": Part("`quantization` = int8", lambda *_: {"quantization": "int8"}, changes_bytes=True),
    "fp8": Part("`quantization` = fp8", lambda *_: {"quantization": "fp8", **BFLOAT16}, changes_bytes=True),
    "kv_fp8": Part("`kv_cache_dtype` = fp8", lambda *_: {"kv_cache_dtype": "fp8", **BFLOAT16}, changes_bytes=True),
    "sparse": Part(
        "`sparse_attention_blocks`", lambda *_: {"sparse_attention_blocks": 3}, changes_bytes=True
    ),
    "recorder": Part(
        "`flight_recorder`, replayed without ranks",
        lambda path, model: {**SWAPPED, "flight_recorder": str(path), **_drafts("eagle")(path, model)},
    ),
}  # fmt: skip
ON_SEVERAL = "is not supported with several ranks"
BESIDE_RANKS = "is not supported together with tensor_parallel_size"
REFUSED: Mapping[tuple[str, str], tuple[str, str]] = {
    **{("hooks", division): ("kv_transfer_config", ON_SEVERAL) for division in DIVISIONS},
    **{("sparse", name): ("sparse_attention_blocks", BESIDE_RANKS) for name in ("tensor", "both", "experts")},
}
"""(part, division) -> setting that the error names, and words of its message."""


def write_models(directory: Path) -> Path:
    """A small Mixtral, and what drafts for it."""
    make_checkpoint("mixtral", directory, num_hidden_layers=4, rms_norm_eps=1e-6)
    make_checkpoint("qwen3", directory / "draft_model", seed=5, num_hidden_layers=1)
    make_eagle(directory / "eagle")
    make_eagle3(directory / "eagle3", aux_layers=(1, 2, 3))
    make_medusa(directory / "medusa")
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == VOCAB_SIZE
    return directory
