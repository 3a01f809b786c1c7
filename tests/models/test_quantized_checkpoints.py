"""Quantized checkpoints against plain ones of the same numbers: in torch exactly, natively within their error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.config.families.registry import parse_config
from quire.config.model import LoadConfig
from quire.distributed.parallel_context import ParallelContext
from quire.errors import ConfigError, UnsupportedError
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.experts import ExpertLinear
from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.native import NativeKernels
from quire.layers.native_coded import CodedExperts, CodedLinearMethod
from quire.models.decoder import DecoderForCausalLM
from quire.models.loader import load_model
from quire.models.model_dir import read_model_dir
from tests.models.awq_files import make_awq, make_gptq
from tests.models.checkpoints import make_checkpoint
from tests.models.compressed_files import KINDS, make_quantized
from tests.models.mixtures import make_mixture
from tests.models.stepping import Stepper
from tests.models.test_families import assert_close, random_ids, reference_logprobs

F32, BF16 = torch.float32, torch.bfloat16
# Of a log-probability: activations in bfloat16, and in int8 where weights have a scale for each row of 8 bits.
NATIVE_ERROR = {"int8": 0.15}
BF16_ERROR = 0.1
Numbers = dict[str, torch.Tensor]
Make = Callable[[Path, Path], Numbers]

MAKERS: dict[str, Make] = {
    **{
        name: lambda checkpoint, directory, kind=kind: make_quantized(checkpoint, directory, kind)  # type: ignore[misc]
        for name, kind in KINDS.items()
    },
    "awq": make_awq,
    "gptq": make_gptq,
    "gptq, version 2": lambda checkpoint, directory: make_gptq(checkpoint, directory, version=2),
    "gptq by row": lambda checkpoint, directory: make_gptq(checkpoint, directory, -1),
    "gptq in act-order": lambda checkpoint, directory: make_gptq(checkpoint, directory, has_act_order=True),
}
NATIVE = (
    "awq", "gptq in act-order", "packed with zero points", "packed 8 bits", "int8", "int8 by matrix", "int8 in groups",
    "int8 with zero points", "fp8", "fp8 in DeepSeek's blocks", "nf4", "int8 of bitsandbytes",
)  # fmt: skip


@pytest.fixture(scope="module")
def runtime() -> NativeRuntime:
    return NativeRuntime(num_threads=2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("plain")
    return directory, make_checkpoint("llama", directory)


def load(directory: Path, kernels: LayerKernels, dtype: torch.dtype) -> DecoderForCausalLM:
    arch = parse_config(read_model_dir(directory).config)
    device = torch.device("cpu")
    return load_model(arch, str(directory), LoadConfig(), dtype, device, ParallelContext(), None, 1024, 0, kernels)


def logprobs_of(reference: Any, numbers: Numbers, ids: list[int]) -> torch.Tensor:
    """Of the plain model of these numbers, by transformers."""
    missing, unexpected = reference.load_state_dict(numbers, strict=False)
    assert not missing and not unexpected
    return reference_logprobs(reference, ids)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_logprobs_are_those_of_the_dequantized_model(tmp_path: Path, plain: tuple[Path, Any], make: Make):
    directory, reference = plain
    ids = random_ids(40)
    expected = logprobs_of(reference, make(directory, tmp_path), ids)
    stepper = Stepper(load(tmp_path, TorchKernels(), F32))
    (logits,) = stepper.step([(stepper.add(ids), len(ids))])
    assert_close(logits, expected)


@pytest.mark.parametrize("name", NATIVE)
def test_native_products_of_every_format_are_within_its_error(
    tmp_path: Path, plain: tuple[Path, Any], runtime: NativeRuntime, name: str
):
    directory, reference = plain
    ids = random_ids(40)
    expected = logprobs_of(reference, MAKERS[name](directory, tmp_path), ids)
    stepper = Stepper(load(tmp_path, NativeKernels(runtime, BF16), BF16))
    (logits,) = stepper.step([(stepper.add(ids), len(ids))])
    error = NATIVE_ERROR.get(name.split()[0], BF16_ERROR)
    assert_close(logits, expected, error)
    margins = expected.topk(2).values
    is_clear = margins[:, 0] - margins[:, 1] > 2 * error
    assert torch.equal(logits.argmax(-1)[is_clear], expected.argmax(-1)[is_clear])


@pytest.mark.parametrize("name", NATIVE)
def test_a_token_has_the_same_bits_in_any_batch_and_steps_are_recorded(
    tmp_path: Path, plain: tuple[Path, Any], caplog: pytest.LogCaptureFixture, name: str
):
    MAKERS[name](plain[0], tmp_path)
    prompts = [{"prompt_token_ids": random_ids(count, seed=count)} for count in (40, 1, 9)]
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1, ignore_eos=True)
    with caplog.at_level(logging.WARNING):
        llm = engine(tmp_path)
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    assert "not captured" not in caplog.text
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob


@pytest.mark.parametrize("name", ["packed with zero points", "packed in act-order", "fp8 in blocks", "int8"])
def test_experts_are_computed_as_they_are_stored(tmp_path: Path, runtime: NativeRuntime, name: str):
    reference = make_mixture("Qwen3Moe", tmp_path / "plain")
    make_quantized(tmp_path / "plain", tmp_path / "quantized", KINDS[name])
    ids = random_ids(40)
    steps = {}
    for key, kernels, dtype in (("torch", TorchKernels(), F32), ("native", NativeKernels(runtime, BF16), BF16)):
        model = load(tmp_path / "quantized", kernels, dtype)
        stepper = Stepper(model)
        (steps[key],) = stepper.step([(stepper.add(ids), len(ids))])
    difference = (steps["native"].log_softmax(-1) - steps["torch"].log_softmax(-1)).abs()
    # Means: where two experts are about as likely, rounding may choose the other one.
    assert difference.mean() < 0.05
    assert (steps["torch"].log_softmax(-1) - reference_logprobs(reference, ids)).abs().mean() < 0.3
    experts = [module for module in model.modules() if isinstance(module, ExpertLinear)]
    methods = {type(module.__dict__["as_stored"]) for module in experts}
    if name not in ("int8", "packed in act-order"):
        assert methods == {CodedExperts}


def test_weights_are_kept_as_codes(tmp_path: Path, plain: tuple[Path, Any], runtime: NativeRuntime):
    make_awq(plain[0], tmp_path)
    model = load(tmp_path, NativeKernels(runtime, BF16), BF16)
    projections = [module for module in model.modules() if "own_segments" in module.__dict__]
    methods = [segment.method for module in projections for segment in module.__dict__["own_segments"]]
    assert sum(isinstance(method, CodedLinearMethod) for method in methods) == 3 * 4
    buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("packed")]
    num_bytes = sum(buffer.numel() for buffer in buffers if buffer.dtype == torch.uint8)
    assert num_bytes == 3 * (128 * 64 + 64 * 64 + 3 * 64 * 96) // 2


@pytest.mark.parametrize("quantization", ["fp8", "bitsandbytes"])
def test_plain_weights_are_quantized_while_they_are_loaded(
    tmp_path: Path, plain: tuple[Path, Any], runtime: NativeRuntime, quantization: str
):
    directory, reference = plain
    model = load(directory, NativeKernels(runtime, BF16, quantization), BF16)
    ids = random_ids(40)
    stepper = Stepper(model)
    (logits,) = stepper.step([(stepper.add(ids), len(ids))])
    reference = reference.from_pretrained(directory, dtype=F32, attn_implementation="eager")
    difference = (logits.log_softmax(-1) - reference_logprobs(reference, ids)).abs()
    assert 0.001 < difference.mean() < 0.3


def engine(directory: Path, **settings: Any) -> LLM:
    return LLM(str(directory), **{"dtype": "bfloat16", "device": "cpu", "num_gpu_blocks_override": 40, **settings})


def test_the_setting_may_name_the_format_of_the_checkpoint_and_no_other(tmp_path: Path, plain: tuple[Path, Any]):
    make_gptq(plain[0], tmp_path)
    prompt, params = {"prompt_token_ids": random_ids(9)}, SamplingParams(temperature=0.0, max_tokens=3)
    given = [engine(tmp_path, quantization=name).generate(prompt, params) for name in (None, "gptq", "gptq_marlin")]
    assert len({tuple(outputs[0].outputs[0].token_ids) for outputs in given}) == 1
    for name in ("awq", "fp8", "int8"):
        with pytest.raises(ConfigError, match="whose weights are in gptq") as error:
            engine(tmp_path, quantization=name)
        assert error.value.field == "quantization"
    with pytest.raises(ConfigError, match="no quantization_config"):
        engine(plain[0], quantization="gptq")
    with pytest.raises(UnsupportedError, match="needs dtype='bfloat16'"):
        engine(plain[0], quantization="fp8", dtype="float32")


def test_a_class_of_transformers_runs_on_a_quantized_checkpoint(tmp_path: Path, plain: tuple[Path, Any]):
    make_awq(plain[0], tmp_path)
    prompt, params = {"prompt_token_ids": random_ids(30)}, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    own, theirs = (engine(tmp_path, model_impl=impl).generate(prompt, params) for impl in ("quire", "transformers"))
    difference = own[0].outputs[0].cumulative_logprob - theirs[0].outputs[0].cumulative_logprob
    assert abs(difference) < BF16_ERROR
