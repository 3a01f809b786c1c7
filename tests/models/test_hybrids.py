"""Hybrids whose checkpoints also see: their text part is served, and what it does not need is left unread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from tests.models.hybrids import EXPERTS, make_seeing_hybrid

PROMPTS = [[5], list(range(7, 40)), [90 + i * i % 97 for i in range(60)]]


def with_stacked_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor for the gates and ups of all experts of a layer, and one for their downs."""
    experts = {name: tensor for name, tensor in weights.items() if ".experts." in name}
    stacked = {name: tensor for name, tensor in weights.items() if name not in experts}
    for stem in {name.partition(".experts.")[0] + ".experts" for name in experts}:
        gates, ups, downs = (
            torch.stack([experts[f"{stem}.{i}.{shard}_proj.weight"] for i in range(EXPERTS["num_experts"])])
            for shard in ("gate", "up", "down")
        )
        stacked |= {f"{stem}.gate_up_proj": torch.cat((gates, ups), 1), f"{stem}.down_proj": downs}
    return stacked


@pytest.mark.parametrize(
    ("family", "is_stacked"), [("Qwen3_5Text", False), ("Qwen3_5MoeText", False), ("Qwen3_5MoeText", True)]
)
def test_the_text_part_of_a_checkpoint_that_also_sees_is_served(tmp_path: Path, family: str, is_stacked: bool):
    reference = make_seeing_hybrid(family, tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert any("visual" in name for name in weights), "the checkpoint has a vision tower"
    weights = with_stacked_experts(weights) if is_stacked else weights
    save_file({**weights, "mtp.fc.weight": torch.ones(2, 2)}, file)  # of a layer that predicts further tokens
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    with LLM(str(tmp_path), dtype="float32", max_model_len=128, num_gpu_blocks_override=64) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        token_ids, logprobs = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert logprobs is not None
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
        scores = torch.log_softmax(logits, dim=-1)
        assert scores.argmax(-1).tolist() == list(token_ids)
        for line, token, expected in zip(logprobs, token_ids, scores, strict=True):
            assert abs(line[token].logprob - float(expected[token])) <= 1e-4
