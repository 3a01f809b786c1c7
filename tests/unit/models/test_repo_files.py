"""Which files of a repository belong to a choice."""

from __future__ import annotations

import pytest

from quire.errors import ModelError
from quire.models.repo_files import checked_name, choose_files, gguf_models, models_of_quant, quant_of


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q8_0.gguf", "Q8_0"),
        ("gemma-3-4b-it-qat-q4_0.gguf", "Q4_0"),
        ("tinyllama-1.1b-chat-v1.0.Q5_K_S.gguf", "Q5_K_S"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Mistral-7B-IQ4_XS.gguf", "IQ4_XS"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("gpt-oss-20b-F16.gguf", "F16"),
        ("llama-7b.fp16.gguf", "F16"),
        ("BF16/DeepSeek-R1-BF16-00001-of-00030.gguf", "BF16"),
        ("Q2_K/model-00001-of-00002.gguf", ""),
        ("model.gguf", ""),
    ],
)
def test_the_quantization_is_read_from_the_name_of_the_file(path: str, quant: str):
    assert quant_of(path) == quant


def test_parts_of_a_split_model_are_one_and_what_is_no_language_model_is_none():
    models = gguf_models(
        ["b/x-Q6_K-00002-of-00002.gguf", "b/x-Q6_K-00001-of-00002.gguf", "x-Q8_0.gguf", "mmproj-x-f16.gguf",
         "x.imatrix.gguf", "imatrix.gguf", "x-Q8_0.json"]
    )  # fmt: skip
    assert [(one.name, one.quant, len(one.paths), one.num_parts) for one in models] == [
        ("x-Q6_K", "Q6_K", 2, 2), ("x-Q8_0", "Q8_0", 1, 1),
    ]  # fmt: skip
    assert models_of_quant(models, "q8_0") == models_of_quant(models, "x-q8_0.GGUF") == [models[1]]
    assert models_of_quant(models, "q6_k")[0].paths[0] == "b/x-Q6_K-00001-of-00002.gguf"


def test_of_a_repository_with_both_formats_safetensors_are_the_default():
    paths = ["config.json", "model.safetensors", "x-Q4_K_M.gguf", "tokenizer.json"]
    assert choose_files("org/x", paths).paths == ("config.json", "tokenizer.json", "model.safetensors")
    chosen = choose_files("org/x", paths, "Q4_K_M")
    assert (chosen.paths, chosen.gguf) == (("x-Q4_K_M.gguf",), "x-Q4_K_M.gguf")
    assert choose_files("org/x", ["x-Q2_K.gguf"]).gguf == "x-Q2_K.gguf", "the only one"


def test_weights_are_those_that_are_read():
    several = ["a-00001-of-00002.safetensors", "a-00002-of-00002.safetensors", "consolidated.safetensors"]
    index = "model.safetensors.index.json"
    assert choose_files("x", [*several, index]).paths == (index, *several[:2])
    assert choose_files("x", ["model.safetensors", "model.fp16.safetensors"]).paths == ("model.safetensors",)
    assert choose_files("x", ["model.safetensors", "sub/model.safetensors", "sub/a.json"]).paths == (
        "model.safetensors",
    )


@pytest.mark.parametrize("name", ["org/name", "gpt2", "Qwen/Qwen3-0.6B", "a/b.c-d_e:Q4_K_M", "a/b:UD-Q4_K_XL"])
def test_names_of_the_hub_are_taken(name: str):
    repo, quant = checked_name(name)
    assert name == (repo if quant is None else f"{repo}:{quant}")


@pytest.mark.parametrize(
    "name", ["", "a/b/c", "../a", "a/..", "a b", "a/b:", "a/b:c d", "https://hub/a", "a--b/c", "a/b:../c"]
)
def test_others_are_refused(name: str):
    with pytest.raises(ModelError, match="not the name of a model"):
        checked_name(name)
