"""A connector that is called around every layer: the same bits; what raises is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.kv_transfer import KVConnector
from tests.e2e.test_connector import BLOCK_SIZE, NUM_PROMPT_TOKENS, Core

NUM_BLOCKS = NUM_PROMPT_TOKENS // BLOCK_SIZE
KEPT: dict[tuple[bytes, str], torch.Tensor] = {}
CALLS: list[tuple[str, str]] = []
RAISES: set[str] = set()


class Layerwise(KVConnector):
    """Saves the full blocks of prompts layer by layer, in the step that computes them, and loads them so."""

    quire_contract = 1
    has_layer_hooks = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known: set[bytes] = set()
        self.loads: list[tuple[bytes, int]] = []
        self.new: list[bytes] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        names = request.block_hashes[num_computed_tokens // BLOCK_SIZE :]
        num_known = next((i for i, name in enumerate(names) if name not in self.known), len(names))
        return num_known * BLOCK_SIZE, False

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        first = len(block_ids) - num_external_tokens // BLOCK_SIZE
        self.loads += zip(request.block_hashes[first:], block_ids[first:], strict=False)

    def build_connector_meta(self, step: Any) -> Any:
        saves = []
        for one in step.scheduled:
            first = one.num_computed_tokens // BLOCK_SIZE
            end = min(one.num_computed_tokens + one.num_scheduled_tokens, one.request.num_prompt_tokens) // BLOCK_SIZE
            saves += zip(one.request.block_hashes[first:end], one.block_ids[first:end], strict=False)
        meta, self.loads = (self.loads, saves), []
        return meta if any(meta) else None

    def update_connector_output(self, output: Any) -> None:
        self.known.update(output.worker_meta or ())

    def wait_for_layer_load(self, layer_name: str) -> None:
        CALLS.append(("wait", layer_name))
        self._may_raise("wait_for_layer_load", layer_name)
        for name, block_id in self.metadata[0]:
            self.kv_caches[layer_name][block_id] = KEPT[name, layer_name]

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any) -> None:
        CALLS.append(("save", layer_name))
        self._may_raise("save_kv_layer", layer_name)
        assert attn_metadata.num_tokens > 0 and kv_layer.data_ptr() == self.kv_caches[layer_name].data_ptr()
        for name, block_id in self.metadata[1]:
            KEPT[name, layer_name] = kv_layer[block_id].clone()

    def wait_for_save(self) -> None:
        CALLS.append(("end", ""))
        self.new += [] if RAISES else [name for name, _ in self.metadata[1]]

    def build_connector_worker_meta(self) -> Any:
        new, self.new = self.new, []
        return new

    def _may_raise(self, call: str, layer_name: str) -> None:
        if call in RAISES and layer_name == list(self.kv_caches)[1]:
            raise RuntimeError(call)


@pytest.fixture(autouse=True)
def empty() -> None:
    for one in (KEPT, CALLS, RAISES):
        one.clear()


CONFIG = {"kv_connector": "Layerwise", "kv_connector_module_path": __name__}


def test_blocks_that_are_saved_and_loaded_layer_by_layer_give_the_same_bits():
    plain = Core()
    expected = plain.answer(0)
    plain.core.shutdown()
    core = Core(kv_transfer_config=CONFIG)
    assert core.answer(0) == expected
    layers = list(dict.fromkeys(name for _, name in CALLS if name))
    in_order = [call for name in layers for call in (("wait", name), ("save", name))] + [("end", "")]
    assert len(layers) > 1 and in_order == CALLS, "one step has metadata, and is the only one with hooks"
    assert len(KEPT) == len(layers) * NUM_BLOCKS
    for handle in (1, 2):
        tokens, logprobs, num_computed = core.answer(handle)
        assert (tokens, logprobs) == expected[:2] and num_computed == expected[2] - NUM_BLOCKS * BLOCK_SIZE
    core.core.shutdown()


@pytest.mark.parametrize("call", ["wait_for_layer_load", "save_kv_layer"])
def test_a_call_of_a_layer_that_raises_costs_the_load_of_its_step_and_no_answer(call, caplog):
    core = Core(kv_transfer_config=CONFIG)
    expected = core.answer(0)
    RAISES.add(call)
    tokens, logprobs, num_computed = core.answer(1)
    assert (tokens, logprobs) == expected[:2] and num_computed >= expected[2]
    assert f"Layerwise failed in {call}" in caplog.text
    core.core.shutdown()
