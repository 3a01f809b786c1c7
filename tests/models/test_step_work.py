"""Work of steps (--enable-mfu-metrics) against the kernels that ran, and against the shapes in a checkpoint's files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from quire import LLM, SamplingParams
from quire.kernels.native.kernel_work import seen_pairs
from quire.models.hub import resolve_model_path
from tests.effort import effort
from tests.models.compressed_files import fp8, int8, make_quantized
from tests.models.families.cases import CASES
from tests.models.stored_models import KINDS, make_tiny

PROMPTS = [list(range(5, 46)), [7, 8, 9]]
NUM_NEW = 6
READ, WRITTEN = (f"vllm:estimated_{what}_bytes_per_gpu" for what in ("read", "write"))


def tiny(kind: str) -> Callable[[Path], Path]:
    return lambda directory: make_tiny(kind, directory)[0]


def family(name: str) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        CASES[name].write(directory / name)
        return directory / name

    return write


def of_vllm(kind: Any) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        make_quantized(family("llama")(directory), directory / "quantized", kind)
        return directory / "quantized"

    return write


def leaf(_: Path) -> Path:
    return Path(resolve_model_path("leaf", None, None))


Subject = tuple[Callable[[Path], Path], dict[str, Any], set[str]]
FORMATS: dict[str, Subject] = {
    "float32": (leaf, {"dtype": "float32"}, {"linear"}),
    "int8": (leaf, {"quantization": "int8"}, {"linear_int8"}),
    "int4": (leaf, {"quantization": "int4"}, {"linear_int4", "linear_int8"}),
    "fp8": (leaf, {"quantization": "fp8"}, {"linear_coded"}),
    "bitsandbytes": (leaf, {"quantization": "bitsandbytes"}, {"linear_coded"}),
    "transformers": (leaf, {"model_impl": "transformers"}, {"linear"}),
    **{kind: (tiny(kind), {}, {"block_linear" if kind == "gguf" else "linear_coded"}) for kind in KINDS},
    "compressed-tensors fp8": (of_vllm(fp8()), {}, {"linear_coded"}),
    "compressed-tensors int8": (of_vllm(int8()), {}, {"linear_int8"}),
}
MIXTURES = {None: "grouped_linear", "int8": "grouped_int8", "int4": "grouped_int4", "fp8": "grouped_coded"}
OTHERS: dict[str, Subject] = {
    **{f"mixtral {name}": (family("mixtral"), {"quantization": name}, {kernel}) for name, kernel in MIXTURES.items()},
    "gpt_oss": (family("gpt_oss"), {}, {"grouped_linear", "paged_attention"}),
    "qwen3_next": (family("qwen3_next"), {}, {"gated_delta_rule", "causal_conv", "grouped_linear"}),
    "mamba": (family("mamba"), {}, {"mamba_scan", "causal_conv"}),
    "mamba2": (family("mamba2"), {}, {"mamba2_scan"}),
    "lfm2": (family("lfm2"), {}, {"causal_conv", "paged_attention"}),
    "gemma3": (family("gemma3"), {}, {"paged_attention"}),
    "deepseek_v2": (family("deepseek_v2"), {}, {"latent_attention", "head_linear"}),
}
SUBJECTS = {**FORMATS, **OTHERS}
FEW = ("transformers", "gguf", "mixtral fp8", "qwen3_next")


def profiled(path: Path, folder: Path, **settings: Any) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Kernels that ran, and what was counted from the model's shape."""
    llm = LLM(
        path, max_model_len=128, max_num_seqs=2, enable_prefix_caching=False, profile=str(folder),
        enable_mfu_metrics=True, disable_log_stats=False, **{"dtype": "bfloat16", **settings},
    )  # fmt: skip
    llm.start_profile()
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": one} for one in PROMPTS], params, use_tqdm=False)
    llm.stop_profile()
    counted = {one.name: float(getattr(one, "value", 0.0)) for one in llm.get_metrics()}
    llm.shutdown()
    (file,) = folder.glob("*-steps.json")
    return [one for one in json.loads(file.read_text())["traceEvents"] if one.get("tid") == 2], counted


@pytest.mark.parametrize("name", effort(FEW, tuple(SUBJECTS)))
def test_operations_of_the_kernels_that_ran_are_those_that_are_counted(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("quire.worker.device.native_cpu.measure_limits", lambda *_: (4e10, 2e10))
    write, settings, kernels = SUBJECTS[name]
    calls, counted = profiled(write(tmp_path), tmp_path / "profile", **settings)
    work = [one["args"] for one in calls if "flops" in one["args"]]
    assert kernels <= {one["name"] for one in calls if "flops" in one["args"]}
    found, expected = sum(one["flops"] for one in work), counted["vllm:estimated_flops_per_gpu"]
    # Of windows the sum over a step is bounded, not each query's; latent attention takes latents of prompts, too.
    assert abs(found / expected - 1) < (0.1 if name == "deepseek_v2" else 2e-3), (found, expected)
    moved = sum(one["bytes"] for one in work)
    assert 0.7 < moved / (counted[READ] + counted[WRITTEN]) < 1.3, "activations here, padding and idle experts there"


def test_operations_are_twice_the_numbers_in_the_files_for_each_token(tmp_path: Path, monkeypatch):
    """Without attention's own, and without what the last layer leaves out of prompts: tokens that all are sampled."""
    monkeypatch.setattr("quire.worker.device.native_cpu.measure_limits", lambda *_: (4e10, 2e10))
    monkeypatch.setattr(f"{__name__}.PROMPTS", [[5], [7]])
    for name in ("llama", "mixtral"):
        path = family(name)(tmp_path)
        config, num_weights = json.loads((path / "config.json").read_text()), 0.0
        for file in path.glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118
                    shape = tensors.get_slice(key).get_shape()
                    if len(shape) >= 2 and "embed" not in key:
                        is_expert = "experts" in key and "gate.weight" not in key
                        share = config["num_experts_per_tok"] / config["num_local_experts"] if is_expert else 1
                        num_weights += share * np.prod(shape)
        _, counted = profiled(path, tmp_path / f"profile of {name}")
        heads = config["num_hidden_layers"] * config["hidden_size"]  # as many elements as queries have
        pairs = 2 * sum(range(1, NUM_NEW + 1))
        expected = 2 * NUM_NEW * 2 * num_weights + 4 * heads * pairs
        assert counted["vllm:estimated_flops_per_gpu"] == pytest.approx(expected, rel=1e-9), name


def test_pairs_of_queries_and_keys_are_those_that_a_loop_finds():
    rng = np.random.default_rng(0)
    for window, chunk in ((0, 0), (5, 0), (0, 4), (1, 0), (100, 0), (0, 100)):
        lens = rng.integers(0, 9, 12)
        ends = lens + rng.integers(0, 12, 12) * (lens > 0)
        seen = [
            [
                set(range(max(0, at - window + 1) if window else at // chunk * chunk if chunk else 0, at + 1))
                for at in range(end - count, end)
            ]
            for count, end in zip(lens, ends, strict=True)
        ]
        pairs = sum(len(keys) for request in seen for keys in request)
        keys = sum(len(set().union(*request)) for request in seen)
        starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        assert seen_pairs(starts, ends.astype(np.int32), window, chunk) == (pairs, keys), (window, chunk)
