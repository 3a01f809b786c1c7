"""The files that the tests make mean what they are said to mean, by readers that are not Quire's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.formats.block_formats import BLOCK_FORMATS
from tests.models import awq_files
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import MIXES, load_tensors, make_gguf, write_plain
from tests.models.gguf_quantizers import dequantize, quantize

# Relative error (root mean square) of normal numbers; about twice the best that the bits allow.
ERRORS = {
    "F32": 0, "F16": 3e-4, "BF16": 2.5e-3, "Q8_0": 0.007, "Q6_K": 0.03, "Q5_0": 0.06, "Q5_1": 0.05, "Q5_K": 0.05,
    "Q4_0": 0.11, "Q4_1": 0.1, "Q4_K": 0.1, "IQ4_NL": 0.1, "IQ4_XS": 0.1, "MXFP4": 0.15, "Q3_K": 0.25, "Q2_K": 0.45,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "tiny"
    make_checkpoint("llama3", directory, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    return directory


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_quantizers_are_about_as_good_as_their_bits_allow(name: str):
    values = np.random.default_rng(0).standard_normal((8, 512), np.float32)
    found = dequantize(quantize(values, name), name)
    assert np.linalg.norm(found - values) <= ERRORS[name] * np.linalg.norm(values)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_zeros_stay_zeros(name: str):
    assert not dequantize(quantize(np.zeros((3, 256), np.float32), name), name).any()


def test_a_gguf_file_has_the_types_that_were_asked_for_and_means_the_numbers_returned(checkpoint: Path, tmp_path: Path):
    meant = make_gguf(checkpoint, tmp_path / "model.gguf", MIXES["every type"])
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {one.name: one for one in reader.tensors}
    found = {name: dequantize(one.data, one.tensor_type.name) for name, one in tensors.items()}
    down = "model.layers.1.mlp.down_proj.weight"
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "IQ4_NL"
    assert np.array_equal(found["blk.1.ffn_down.weight"], meant[down].numpy())
    assert tensors["blk.0.attn_norm.weight"].tensor_type.name == "F32"
    query = found["blk.0.attn_q.weight"].reshape(4, 32, 2, 256)  # pairs of rows that rotate together
    assert np.array_equal(
        query.swapaxes(1, 2).reshape(256, 256), meant["model.layers.0.self_attn.q_proj.weight"].numpy()
    )
    assert found["rope_freqs.weight"].min() == 1 and found["rope_freqs.weight"].max() == 8
    assert meant.keys() == load_tensors(checkpoint).keys()
    assert reader.fields["llama.rope.freq_base"].contents() == 500000


def test_split_files_have_all_tensors(checkpoint: Path, tmp_path: Path):
    make_gguf(checkpoint, tmp_path / "model.gguf", "Q8_0", tensors_per_file=9)
    paths = sorted(tmp_path.glob("*.gguf"))
    assert paths[0].name == "model-00001-of-00003.gguf" and len(paths) == 3
    names = [one.name for path in paths for one in gguf.GGUFReader(path).tensors]
    assert len(names) == len(set(names)) == len(load_tensors(checkpoint)) + 1


def test_rows_that_large_blocks_do_not_divide_get_smaller_ones(tmp_path: Path):
    make_checkpoint("qwen2", tmp_path / "tiny", num_hidden_layers=1)
    make_gguf(tmp_path / "tiny", tmp_path / "model.gguf", "Q4_K")
    types = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert types["blk.0.attn_q.weight"] == "Q5_0" and types["blk.0.attn_q.bias"] == "F32"
    assert "output.weight" not in types


@pytest.mark.parametrize("kind", ["awq", "gptq", "gptq_v2 with act-order"])
def test_codes_of_four_bits_mean_the_numbers_returned(kind: str, checkpoint: Path, tmp_path: Path):
    if kind == "awq":
        meant = awq_files.make_awq(checkpoint, tmp_path / "made")
    else:
        is_second = kind.startswith("gptq_v2")
        meant = awq_files.make_gptq(
            checkpoint, tmp_path / "made", has_act_order=is_second, version=2 if is_second else 1
        )
    given, made = load_tensors(checkpoint), load_tensors(tmp_path / "made")
    name = "model.layers.0.mlp.down_proj"
    one, output, word = 37, 21, 21 // 8
    half = (0, 4, 1, 5, 2, 6, 3, 7)[output % 8] if kind == "awq" else output % 8
    group = int(made[f"{name}.g_idx"][one]) if kind != "awq" else one // 32
    zero = (int(made[f"{name}.qzeros"][group, word]) >> (4 * half)) & 15
    if kind == "awq":
        code = (int(made[f"{name}.qweight"][one, word]) >> (4 * half)) & 15
    else:
        code = (int(made[f"{name}.qweight"][one // 8, output]) >> (4 * (one % 8))) & 15
        zero += kind == "gptq"
    value = (code - zero) * float(made[f"{name}.scales"][group, output])
    assert value == pytest.approx(float(meant[f"{name}.weight"][output, one]), rel=1e-6)
    error = (meant[f"{name}.weight"] - given[f"{name}.weight"]).norm() / given[f"{name}.weight"].norm()
    assert error < 0.12
    plain = write_plain(tmp_path / "made", meant, tmp_path / "plain")
    assert torch.equal(load_tensors(plain)[f"{name}.weight"], meant[f"{name}.weight"])
    assert "quantization_config" not in (plain / "config.json").read_text()
