"""GGUF files of every architecture that Quire reads: tokens and log-probabilities are those of their checkpoint.

Parity is with `transformers` in float32, on the engine. Files of quantized tensors are in tests/kernels and tests/e2e.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from quire.config.model import LoadConfig
from quire.distributed.parallel_context import ParallelContext
from quire.layers.kernels import TorchKernels
from quire.models.gguf.registry import ARCHITECTURES
from quire.models.loader import load_model
from quire.models.model_dir import read_model_dir
from quire.models.packing_key import packing_key
from quire.models.weight_files import find_weight_files
from tests.effort import effort
from tests.models.families import checks
from tests.models.families.cases import CASES
from tests.models.families.checks import Subject
from tests.models.gguf_families import FAMILIES
from tests.models.gguf_family_files import one_by_one, rewrite, with_pairs, write_family
from tests.models.gguf_files import make_gguf, write_plain

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7,
    "mscale_all_dim": 0.7,
}  # fmt: skip
# What differs from the case where the file cannot say it: windows that converters leave out, and such.
CHANGED: dict[str, dict[str, object]] = {
    "mistral": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "phi3": {"rope_scaling": None, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7, 2.2, 2.8],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0], "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 1024,
    }},
    "lfm2": {"conv_bias": False, "block_auto_adjust_ff_dim": False},
    "phimoe": {"router_jitter_noise": 0.01},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "qwen2_moe": {"mlp_only_layers": []},
    "qwen3_moe": {"decoder_sparse_step": 1},
    "qwen3_next": {"mlp_only_layers": []},
    "granite_hybrid": {"position_embedding_type": "nope"},
    "deepseek_v2": {"rope_parameters": YARN},
    "deepseek_v3": {"rope_parameters": YARN},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
}  # fmt: skip
# Tried in `make test`; `make test-full` takes all.
USUAL = (
    "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3", "phi3", "granite", "olmo2", "smollm3",
    "gpt_oss", "qwen3_5", "gemma4", "gpt2", "lfm2", "mamba2", "deepseek_v3", "granite_hybrid",
)  # fmt: skip


@pytest.mark.parametrize("name", effort([name for name in FAMILIES if name in USUAL], list(FAMILIES)))
def test_a_file_answers_as_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    case = dataclasses.replace(CASES[name], fields={**CASES[name].fields, **CHANGED.get(name, {})})
    checkpoint, path = tmp_path / "checkpoint", tmp_path / f"{name}.gguf"
    reference = case.write(checkpoint)
    write_family(name, checkpoint, path)
    monkeypatch.setattr(checks, "LENGTHS", (1, 7, 40, 130))
    settings = {**case.settings, "tokenizer": str(checkpoint)}
    checks.parity(Subject(dataclasses.replace(case, settings=settings), path, reference))


def test_every_architecture_is_tried():
    assert {family.name for family in FAMILIES.values()} == set(ARCHITECTURES)


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """Everything that a model holds, on torch in float32: quantized matrices as the numbers that they mean."""
    arch, cpu = read_model_dir(path).arch(), torch.device("cpu")
    kernels, parallel = TorchKernels(), ParallelContext()
    model = load_model(arch, str(path), LoadConfig(), torch.float32, cpu, parallel, None, 256, 0, kernels)
    return model.stored_tensors()


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2_moe", "gemma3"])
def test_quantized_rows_find_their_places(tmp_path: Path, name: str):
    """Permuted rows, stacked experts and rows in several formats: each means what it means in the file, bit for bit."""
    fields = {**CASES[name].fields, **CHANGED.get(name, {}), "hidden_size": 256, "num_hidden_layers": 2}
    fields |= {"layer_types": ["sliding_attention"] * 2} if name == "gemma3" else {}
    checkpoint = tmp_path / "checkpoint"
    dataclasses.replace(CASES[name], fields=fields).write(checkpoint)
    numbers = make_gguf(checkpoint, tmp_path / "model.gguf", "every type", tensors_per_file=9)
    plain = write_plain(checkpoint, numbers, tmp_path / "plain")
    stored, expected = weights_of(next(tmp_path.glob("model*.gguf"))), weights_of(plain)
    assert stored.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(stored[key], tensor), key


def test_packed_weights_of_a_file_are_known_by_what_is_in_it(tmp_path: Path):
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    CASES["qwen3"].write(checkpoint)
    write_family("qwen3", checkpoint, path)
    _, files = find_weight_files(path)
    keys = [packing_key(files, {})]
    time = path.stat().st_mtime_ns
    for place in (path.read_bytes().index(b"<300>") + 1, path.stat().st_size - 1):
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(time, time))
        keys.append(packing_key(files, {}))
    assert len(set(keys)) == 3


def test_experts_as_one_tensor_and_as_many_are_the_same(tmp_path: Path):
    """Gates and ups of all experts together, and a tensor for each expert, as the first files had them."""
    checkpoint, path = tmp_path / "checkpoint", tmp_path / "model.gguf"
    CASES["mixtral"].write(checkpoint)
    write_family("mixtral", checkpoint, path)
    expected = weights_of(path)
    for change in (with_pairs, one_by_one):
        rewritten = tmp_path / f"{change.__name__}.gguf"
        rewrite(path, rewritten, change)
        stored = weights_of(rewritten)
        assert all(torch.equal(stored[key], tensor) for key, tensor in expected.items())
