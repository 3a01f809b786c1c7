"""Latent attention in the variants of its families, by both backends, against transformers; and what is refused.

`tests/models/families` has the families themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.errors import UnsupportedError
from tests.models.checkpoints import COMMON, make_tokenizer
from tests.models.latents import LATENTS, YARN

TOLERANCE = 1e-4  # of a log-probability, float32
PARAMS = SamplingParams(max_tokens=24, temperature=0, logprobs=0, ignore_eos=True)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek v2": ("DeepseekV2", {}),
    "deepseek v2 lite": ("DeepseekV2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek v3 with biases": ("DeepseekV3", {"attention_bias": True}),
    "deepseek v3 without interleaved pairs": ("DeepseekV3", {"rope_interleave": False, "norm_topk_prob": False}),
    "minicpm3 with yarn and biases": ("MiniCPM3", {"v_head_dim": 12, "attention_bias": True, "rope_parameters": YARN}),
    "minicpm3 without compressed queries": ("MiniCPM3", {"q_lora_rank": None, "attention_bias": True}),
}
PROMPTS = [
    torch.randint(5, 300, (size,), generator=torch.Generator().manual_seed(size)).tolist()
    for size in (1, 2, 17, 33, 70, 150)
]


def write(prefix: str, directory: Path, **changes: Any) -> Any:
    """A checkpoint with random weights, biases included; returns the model that was written."""
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **LATENTS[prefix], **changes})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


@pytest.mark.parametrize("backend", ["native_cpu", "torch_reference"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_equal_those_of_transformers(tmp_path: Path, case: str, backend: str):
    prefix, changes = CASES[case]
    model = write(prefix, tmp_path, **changes)
    llm = LLM(str(tmp_path), dtype="float32", max_model_len=256, attention_backend=backend)
    requests = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
    for prompt, request in zip(PROMPTS, requests, strict=True):
        (output,) = request.outputs
        ids = list(output.token_ids)
        assert output.logprobs is not None
        logprobs = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + ids])).logits[0].log_softmax(dim=-1)[len(prompt) - 1 : -1]
        assert expected.argmax(dim=1).tolist() == ids
        difference = expected.gather(1, torch.tensor(ids)[:, None]).flatten() - torch.tensor(logprobs)
        assert not float(difference.abs().max()) > TOLERANCE


def test_an_eight_bit_cache_is_refused_by_name(tmp_path: Path):
    write("MiniCPM3", tmp_path)
    with pytest.raises(UnsupportedError, match="kv_cache_dtype='fp8_e4m3' is not supported for latent attention"):
        LLM(str(tmp_path), dtype="bfloat16", kv_cache_dtype="fp8")
