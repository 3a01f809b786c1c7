"""Mixtures of experts against transformers in float32; and native steps, recorded, in every format of weights."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.config.families.registry import parse_config
from quire.config.model import LoadConfig
from quire.config.model_arch import MoEArch
from quire.distributed.parallel_context import ParallelContext
from quire.errors import ModelError, WeightsError
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.native import NativeKernels
from quire.models.decoder import DecoderForCausalLM
from quire.models.loader import load_model
from quire.models.model_dir import read_model_dir
from tests.models.mixtures import MIXTURES, make_mixture
from tests.models.stepping import Stepper
from tests.models.test_families import assert_close, random_ids, reference_logprobs

F32 = torch.float32


def load(directory: Path, kernels: LayerKernels, dtype: torch.dtype = F32) -> DecoderForCausalLM:
    arch = parse_config(read_model_dir(directory).config)
    device = torch.device("cpu")
    return load_model(arch, str(directory), LoadConfig(), dtype, device, ParallelContext(), None, 1024, 0, kernels)


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return NativeRuntime(num_threads=2)


@pytest.mark.parametrize("family", MIXTURES)
def test_logprobs_equal_those_of_transformers(tmp_path: Path, runtime: NativeRuntime, family: str):
    reference = make_mixture(family, tmp_path)
    prompts = [random_ids(90, seed=1), random_ids(33, seed=2), random_ids(1, seed=3)]
    expected = [reference_logprobs(reference, ids) for ids in prompts]
    for kernels in (TorchKernels(), NativeKernels(runtime, F32)):
        stepper = Stepper(load(tmp_path, kernels))
        whole = stepper.step([(stepper.add(ids), len(ids)) for ids in prompts])
        for logits, logprobs in zip(whole, expected, strict=True):
            assert_close(logits, logprobs)


def test_the_scales_of_longrope_are_those_of_the_config(tmp_path: Path):
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_mscale": 1.3, "long_mscale": 1.2}
    rope |= {"short_factor": [1.1] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 2048}
    fields = {"rope_parameters": rope, "max_position_embeddings": 4096, "original_max_position_embeddings": 2048}
    reference, ids = make_mixture("Phimoe", tmp_path, **fields), random_ids(60)
    stepper = Stepper(load(tmp_path, TorchKernels()))
    (logits,) = stepper.step([(stepper.add(ids), len(ids))])
    assert_close(logits, reference_logprobs(reference, ids))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ["Qwen2Moe", "GptOss"])
def test_decode_steps_are_recorded_and_tokens_do_not_depend_on_the_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, quantization: str | None
):
    make_mixture(family, tmp_path)
    prompts = [{"prompt_token_ids": random_ids(count, seed=count)} for count in (30, 1, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    with caplog.at_level(logging.WARNING):
        llm = LLM(str(tmp_path), dtype="bfloat16", quantization=quantization, device="cpu", num_gpu_blocks_override=40)
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert "not captured" not in caplog.text
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob


def moe_of(family: str, tmp_path: Path) -> list[MoEArch | None]:
    make_mixture(family, tmp_path)
    return [layer.moe for layer in parse_config(read_model_dir(tmp_path).config).layers]


def test_layers_without_experts_are_those_of_the_config(tmp_path: Path):
    assert [moe is None for moe in moe_of("Qwen2Moe", tmp_path / "a")] == [False, True, False]
    assert [moe is None for moe in moe_of("Qwen3Moe", tmp_path / "b")] == [True, False, True]
    assert [moe is None for moe in moe_of("Glm4Moe", tmp_path / "c")] == [True, False, False]


@pytest.mark.parametrize(
    ("family", "fields", "word"),
    [
        ("Mixtral", {"num_local_experts": 0}, "num_local_experts"),
        ("Mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("Phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("Glm4Moe", {"n_group": 3}, "n_group"),
        ("Olmoe", {"clip_qkv": -8.0}, "clip_qkv"),
        ("Glm4Moe", {"n_group": 8, "topk_group": 2}, "topk_group"),
        ("GptOss", {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
    ],
    ids=str,
)
def test_impossible_mixtures_are_refused(tmp_path: Path, family: str, fields: dict[str, object], word: str):
    make_mixture(family, tmp_path)
    with pytest.raises(ModelError, match=word):
        parse_config({**read_model_dir(tmp_path).config, **fields})


def in_mxfp4(directory: Path) -> None:
    """Round the experts of a checkpoint to numbers of MXFP4 and store them so; matrices of 64 and 96 inputs."""
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        given = weights.pop(name).transpose(1, 2)  # [num_experts, output_size, input_size]
        shape = (*given.shape[:2], given.shape[2] // 32, 16)
        generator = torch.Generator().manual_seed(len(weights))
        weights[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        weights[f"{name}_scales"] = torch.randint(120, 124, shape[:3], generator=generator, dtype=torch.uint8)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))


def test_experts_in_mxfp4_are_the_numbers_that_they_stand_for(tmp_path: Path, runtime: NativeRuntime):
    reference = make_mixture("GptOss", tmp_path)
    in_mxfp4(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                blocks, scales = weights[f"{name}_blocks"], weights[f"{name}_scales"]
                codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
                sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
                numbers = torch.where(codes >= 8, -sizes, sizes) * 2.0 ** (scales[..., None].float() - 127)
                parameter.copy_(numbers.flatten(-2).transpose(1, 2))
    ids = random_ids(40)
    expected = reference_logprobs(reference, ids)
    stepper = Stepper(load(tmp_path, TorchKernels()))
    (logits,) = stepper.step([(stepper.add(ids), len(ids))])
    assert_close(logits, expected)
    native = load(tmp_path, NativeKernels(runtime, F32))
    stepper = Stepper(native)
    (logits,) = stepper.step([(stepper.add(ids), len(ids))])
    assert (logits.log_softmax(-1) - expected).abs().mean() < 0.05  # activations are quantized, and experts may change
    kept = {buffer.dtype for name, buffer in native.named_buffers() if "experts" in name}
    assert kept == {torch.uint8}


def test_scales_of_another_type_are_refused(tmp_path: Path, runtime: NativeRuntime):
    make_mixture("GptOss", tmp_path)
    in_mxfp4(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    save_file({**weights, name: weights[name].float()}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"down_proj_scales is float32, expected uint8"):
        load(tmp_path, NativeKernels(runtime, F32))
