"""Bad settings, flags, model directories, prompts and templates: refused quickly, by name, with the fix.

The CPU time of every case is measured from the call to the refusal, and nothing in a model directory may be executed.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import EXIT_ERROR, main
from quire.core.sampling_params import SamplingParams
from quire.entrypoints.llm import LLM
from quire.errors import QuireError
from tests.e2e.bad_models import BAD_MODELS, BAD_TEMPLATES
from tests.e2e.tiny_model import MAX_LEN, VOCAB_SIZE, write_tiny_model

MAX_CPU_S = 20.0  # generous: on a quiet machine the slowest takes about two
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 1 << 20}


@dataclasses.dataclass(frozen=True)
class Place:
    """A good model directory, and the file that its hostile parts would create."""

    directory: Path
    marker: Path

    def assert_nothing_ran(self) -> None:
        assert not self.marker.exists(), "something from the model directory was executed"
        assert not [name for name in sys.modules if name.endswith("_evil")]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    marker = tmp_path / "executed"
    made = Place(write_tiny_model(tmp_path / "model", marker), marker)
    yield made
    made.assert_nothing_ran()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A working engine; making it also pays for the imports that the timed cases must not."""
    root = tmp_path_factory.mktemp("good")
    made = Place(write_tiny_model(root / "model", root / "executed"), root / "executed")
    yield LLM(str(made.directory), **SMALL)
    made.assert_nothing_ran()


def refused(action: Callable[[], object], words: tuple[str, ...]) -> QuireError:
    """Run `action`, which must be refused in time with all of `words` in the message, and a hint."""
    start = time.process_time()  # whatever else the machine does meanwhile
    with pytest.raises(QuireError) as caught:
        action()
    elapsed = time.process_time() - start
    answer = str(caught.value)
    assert all(word in answer for word in words), f"{words} not all in: {answer}"
    assert caught.value.hint, f"no hint: {answer}"
    assert elapsed < MAX_CPU_S, f"took {elapsed:.1f} s: {answer}"
    return caught.value


BAD_SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "misspelt setting": ({"max_modle_len": 64}, ("max_modle_len", "did you mean 'max_model_len'")),
    "setting of another engine": ({"enable_lora": True}, ("enable_lora", "leave out")),
    "length as text": ({"max_model_len": "64"}, ("max_model_len", "an integer")),
    "length below one": ({"max_model_len": 0}, ("max_model_len", "1 to")),
    "length beyond the model": ({"max_model_len": MAX_LEN + 1}, ("max_model_len", f"<= {MAX_LEN}")),
    "absurd length": ({"max_model_len": 10**15}, ("max_model_len", "1 to")),
    "length not a number": ({"max_model_len": math.nan}, ("max_model_len", "an integer")),
    "no memory at all": ({"gpu_memory_utilization": 0.0}, ("gpu_memory_utilization", "0.01 to 1.0")),
    "more memory than there is": ({"gpu_memory_utilization": 1.5}, ("gpu_memory_utilization", "0.01 to 1.0")),
    "memory share not a number": ({"gpu_memory_utilization": math.nan}, ("gpu_memory_utilization", "0.01 to 1.0")),
    "cache smaller than one request": ({"kv_cache_memory_bytes": 64}, ("KV cache", "kv_cache_memory_bytes")),
    "more host memory than there is": ({"kv_offloading_size": 1e6}, ("kv_offloading_size", "does not fit")),
    "pages without a page": ({"num_gpu_blocks_override": 1}, ("num_gpu_blocks_override", "2 to")),
    "more pages than memory": ({"num_gpu_blocks_override": 2**31 - 1}, ("num_gpu_blocks_override",)),
    "page of no tokens": ({"block_size": 0}, ("block_size", "1 to")),
    "more requests than tokens": ({"max_num_seqs": 128}, ("max_num_seqs", "max_num_batched_tokens")),
    "absurd number of requests": ({"max_num_seqs": 10**9}, ("max_num_seqs", "65536")),
    "no chunks and short steps": ({"enable_chunked_prefill": False}, ("max_num_batched_tokens", str(MAX_LEN))),
    "unknown dtype": ({"dtype": "fp8"}, ("dtype", "bfloat16")),
    "unknown quantization": ({"quantization": "int3"}, ("quantization", "int8")),
    "quantization that is not supported yet": (
        {"quantization": "modelopt"},
        ("quantization", "does not implement", "int8"),
    ),
    "format that the checkpoint does not have": (
        {"quantization": "awq"},
        ("quantization", "quantization_config", "int8"),
    ),
    "quantization without its kernels": (
        {"quantization": "int8", "attention_backend": "torch_reference"},
        ("quantization", "native_cpu"),
    ),
    "pages that the kernels cannot have": (
        {"block_size": 8, "attention_backend": "native_cpu"},
        ("native_cpu", "block_size", "multiple of 16"),
    ),
    "pages that no kernel has": ({"block_size": 8}, ("block_size", "multiple of 16", "torch_reference")),
    "half precision for the native kernels": (
        {"dtype": "float16", "attention_backend": "native_cpu"},
        ("native_cpu", "float32"),
    ),
    "unknown kernel tier": ({"kernel_tier": "mmx"}, ("kernel_tier", "avx2")),
    "two processes in one": (
        {"tensor_parallel_size": 2, "distributed_executor_backend": "uni"},
        ("distributed_executor_backend", "tensor_parallel_size=2", "'mp'"),
    ),
    "a name of earlier versions": ({"guided_decoding_backend": "xgrammar"}, ("--structured-outputs-backend",)),
    "settings as a list": ({"speculative_config": ["ngram"]}, ("speculative_config", "JSON object (a dict, or its")),
    "overrides as a function": ({"hf_overrides": print}, ("hf_overrides", "JSON object (a dict, or its text)")),
    "adapters": ({"enable_lora": True}, ("enable_lora", "leave out")),
    "draft model without a model": ({"speculative_config": {"method": "draft_model"}}, ("speculative_config", "model")),
    "unknown key of drafts": (
        {"speculative_config": {"method": "ngram", "prompt_lookup": 3}},
        ("speculative_config", "prompt_lookup_m"),
    ),
    "device that is not there": ({"device": "tpu"}, ("device", "cpu")),
    "unknown attention backend": ({"attention_backend": "FLASH_ATTN"}, ("attention_backend", "torch_reference")),
    "unknown policy": ({"scheduling_policy": "lottery"}, ("scheduling_policy", "fcfs")),
    "pickled weights": ({"load_format": "pt"}, ("load_format", "safetensors")),
    "watermark of everything": ({"watermark": 1.0}, ("watermark", "< 1.0")),
    "seed as text": ({"seed": "0"}, ("seed", "an integer")),
    "switch as text": ({"enable_prefix_caching": "yes"}, ("enable_prefix_caching", "true or false")),
    "no model": ({"model": ""}, ("model",)),
    "model that is not there": ({"model": "/no/such/directory"}, ("/no/such/directory", "directory")),
    "model outside the hub": ({"model": "../../etc/passwd\0"}, ("model",)),
    "model path climbing up": ({"model": "../../no/such"}, ("../../no/such", "directory")),
    "tokenizer that is not there": ({"tokenizer": "/no/such/tokenizer"}, ("tokenizer",)),
    "template that is broken": ({"chat_template": "{% for %}"}, ("chat template",)),
}


@pytest.mark.parametrize(("settings", "words"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_bad_settings_are_refused(engine: LLM, place: Place, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(lambda: LLM(**{"model": str(place.directory), **SMALL, **settings}), words)


@pytest.mark.parametrize(("spoil", "words"), BAD_MODELS.values(), ids=BAD_MODELS.keys())
def test_bad_model_directories_are_refused(
    engine: LLM, place: Place, spoil: Callable[[Path], object], words: tuple[str, ...]
) -> None:
    spoil(place.directory)
    refused(lambda: LLM(str(place.directory), **SMALL), words)


def test_a_model_that_does_not_fit_into_memory_is_refused_before_it_is_made(engine: LLM, place: Place) -> None:
    from tests.e2e.bad_models import config

    config(hidden_size=1 << 15, intermediate_size=1 << 18, num_hidden_layers=900, num_attention_heads=128)(
        place.directory
    )
    refused(lambda: LLM(str(place.directory), load_format="dummy", **SMALL), ("GiB",))


BAD_FLAGS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "misspelt command": (["genrate"], ("did you mean 'generate'",)),
    "misspelt flag": (["generate", "--max-modle-len", "5", "hi"], ("did you mean '--max-model-len'",)),
    "flag not supported yet": (["generate", "--enable-lora", "hi"], ("enable_lora", "leave out")),
    "text for a number": (["generate", "--max-num-seqs", "many", "hi"], ("--max-num-seqs", "an integer")),
    "flag without its value": (["generate", "--max-num-seqs"], ("--max-num-seqs", "--help")),
    "config file that is not there": (["generate", "--config", "/no/such.json", "hi"], ("/no/such.json", "path")),
    "yaml config file that is not there": (["generate", "--config", "/no/such.yaml", "hi"], ("/no/such.yaml", "path")),
}


@pytest.mark.parametrize(("argv", "words"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_bad_flags_are_refused_without_a_traceback(
    engine: LLM, argv: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    start = time.process_time()
    assert main(argv) == EXIT_ERROR
    elapsed = time.process_time() - start
    answer = capsys.readouterr().err
    assert all(word in answer for word in words), f"{words} not all in: {answer}"
    assert "hint:" in answer and "Traceback" not in answer and elapsed < MAX_CPU_S


BAD_REQUESTS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "empty prompt": ("", None, ("prompt", "empty")),
    "prompt of no ids": ([[]], None, ("prompt",)),
    "prompt of a wrong type": (5, None, ("prompt",)),
    "prompt with an unknown key": ({"promt": "x"}, None, ("promt", "'prompt'")),
    "prompt with an image": ({"prompt": "x", "multi_modal_data": {}}, None, ("multi_modal_data",)),
    "id outside the vocabulary": ({"prompt_token_ids": [VOCAB_SIZE]}, None, (str(VOCAB_SIZE),)),
    "prompt as long as the model": ({"prompt_token_ids": [1] * MAX_LEN}, None, (str(MAX_LEN), "max_model_len")),
    "absurdly long prompt": ("x" * 300_000, None, ("max_model_len",)),
    "stop id outside the vocabulary": ("x", {"stop_token_ids": [10**6]}, ("stop_token_ids", str(VOCAB_SIZE - 1))),
    "bias outside the vocabulary": ("x", {"logit_bias": {10**6: 1.0}}, ("logit_bias", str(VOCAB_SIZE - 1))),
    "allowed id outside the vocabulary": ("x", {"allowed_token_ids": [10**6]}, ("allowed_token_ids",)),
    "more logprobs than the engine gives": ("x", {"logprobs": 21}, ("logprobs", "max_logprobs")),
    "two parameter lists for one prompt": (["x"], [{}, {}], ("sampling_params",)),
}


@pytest.mark.parametrize(("prompt", "values", "words"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_bad_requests_are_refused_and_the_engine_goes_on(
    engine: LLM, prompt: Any, values: Any, words: tuple[str, ...]
) -> None:
    if isinstance(values, list):
        params: Any = [SamplingParams(**one) for one in values]
    else:
        params = SamplingParams(**(values or {}))
    refused(lambda: engine.generate(prompt, params, use_tqdm=False), words)
    good = engine.generate("hello", SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    assert good[0].finished and good[0].outputs[0].token_ids


@pytest.mark.parametrize(("template", "words"), BAD_TEMPLATES.values(), ids=BAD_TEMPLATES.keys())
def test_hostile_chat_templates_are_refused(engine: LLM, template: str, words: tuple[str, ...]) -> None:
    messages = [{"role": "user", "content": "hello"}]
    refused(lambda: engine.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False, chat_template=template), words)


def test_a_good_directory_full_of_hostile_files_loads_and_runs_none_of_them(place: Place) -> None:
    engine = LLM(str(place.directory), **SMALL)
    output = engine.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3, ignore_eos=True), False)
    assert len(output[0].outputs[0].token_ids) == 3


def test_there_are_at_least_sixty_bad_configurations_and_model_directories() -> None:
    assert len(BAD_SETTINGS) + len(BAD_MODELS) >= 60
