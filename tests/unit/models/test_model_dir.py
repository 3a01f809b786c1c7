"""Reading a model directory's descriptions, and finding the directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ModelError
from quire.models import hub
from quire.models.hub import resolve_model_path
from quire.models.model_dir import MAX_CONFIG_BYTES, read_model_dir


def test_both_descriptions_are_read(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    assert read_model_dir(tmp_path).generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    found = read_model_dir(str(tmp_path))
    assert (found.config, found.generation_config) == ({"vocab_size": 7}, {"temperature": 0.5})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "invalid JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"a": NaN}', "not a JSON number"),
        (b'{"a": 1, "a": 2}', "more than once"),
        (b"\xff", "invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{" + b" " * MAX_CONFIG_BYTES + b"}", "at most"),
    ],
    ids=["empty", "list", "nan", "repeated", "not text", "nested", "huge"],
)
def test_a_bad_description_is_refused_by_name(tmp_path: Path, content: bytes, said: str):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read_model_dir(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("present", "hint"),
    [("adapter_config.json", "LoRA adapter"), ("params.json", "original files"), ("x", "Hugging Face format")],
)
def test_a_directory_without_config_says_what_it_might_be(tmp_path: Path, present: str, hint: str):
    (tmp_path / present).write_text("{}")
    with pytest.raises(ModelError, match=r"no config\.json") as caught:
        read_model_dir(tmp_path)
    assert hint in str(caught.value.hint)


def test_a_missing_directory_is_refused(tmp_path: Path):
    with pytest.raises(ModelError, match="is not a directory"):
        read_model_dir(tmp_path / "gone")


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path):
    assert resolve_model_path(str(tmp_path), None, None) == tmp_path.resolve()


def test_leaf_is_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leaf").mkdir()
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "quire" / "models" / "hub.py"))
    with pytest.raises(ModelError, match="does not include the embedded model"):
        resolve_model_path("leaf", None, None)
    embedded = tmp_path / "quire" / "assets" / "leaf"
    embedded.mkdir(parents=True)
    (embedded / "config.json").write_text("{}")
    assert resolve_model_path("leaf", None, None) == embedded


@pytest.mark.parametrize(
    "name", ["./gone", "/gone/model", "a/b/c", "../up", "", "a b", "-x/y", "x/..", "https://hub/x"], ids=repr
)
def test_what_is_no_directory_and_no_hub_id_is_refused_without_the_network(name: str):
    with pytest.raises(ModelError) as caught:
        resolve_model_path(name, None, None)
    assert "model" in str(caught.value) and caught.value.hint


def test_a_gguf_file_is_a_model_and_another_file_is_not(tmp_path: Path):
    for name in ("model.gguf", "model.bin"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert resolve_model_path(str(tmp_path / "model.gguf"), None, None) == tmp_path / "model.gguf"
    with pytest.raises(ModelError, match="is a file") as caught:
        resolve_model_path(str(tmp_path / "model.bin"), None, None)
    assert "pass a .gguf file" in str(caught.value.hint)


def test_a_directory_of_gguf_files_alone_is_the_one_model_in_it(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-Q8_0.gguf").write_bytes(b"GGUF")
    assert resolve_model_path(str(tmp_path), None, None) == tmp_path / "model-Q8_0.gguf"
    (tmp_path / "model-Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF models: model-Q4_0\.gguf, model-Q8_0\.gguf"):
        resolve_model_path(str(tmp_path), None, None)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_model_path(str(tmp_path), None, None) == tmp_path
