"""`quire inspect` on model directories of all kinds: it says whether they run here, and a start agrees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import QuireError
from tests.models.awq_files import make_awq
from tests.models.checkpoints import make_checkpoint
from tests.models.families.cases import CASES
from tests.models.families.through_transformers import THROUGH_TRANSFORMERS
from tests.models.gguf_files import make_gguf
from tests.models.heads import make_eagle
from tests.models.stored_models import SIZES

ROOT = Path(__file__).parents[2]
SETTINGS = {"num_threads": 1, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]
Make = Callable[[Path], object]


def edited(name: str, **changes: object) -> Make:
    """A dense model with fields of a JSON file changed; None removes one."""

    def make(path: Path) -> None:
        make_checkpoint("llama", path)
        fields = json.loads((path / name).read_text())
        kept = {key: value for key, value in {**fields, **changes}.items() if value is not None}
        (path / name).write_text(json.dumps(kept))

    return make


def without(*names: str) -> Make:
    def make(path: Path) -> None:
        make_checkpoint("llama", path, max_shard_size="60KB")
        for name in names:
            next(path.glob(name)).unlink()

    return make


def with_file(name: str, content: bytes) -> Make:
    def make(path: Path) -> None:
        make_checkpoint("llama", path)
        (path / name).write_bytes(content)

    return make


def truncated(path: Path) -> None:
    make_checkpoint("llama", path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def pickled(path: Path) -> None:
    make_checkpoint("llama", path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def of_another_model(path: Path) -> None:
    make_checkpoint("llama", path, num_hidden_layers=1)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2'))


def awq(path: Path) -> None:
    make_checkpoint("llama3", path / "checkpoint", **SIZES)
    make_awq(path / "checkpoint", path)


def gguf(path: Path) -> None:
    make_checkpoint("llama3", path / "checkpoint", **SIZES)
    make_gguf(path / "checkpoint", path / "model-Q4_K_M.gguf", "Q4_K_M")


def broken_gguf(path: Path) -> None:
    gguf(path)
    file = path / "model-Q4_K_M.gguf"
    file.write_bytes(file.read_bytes()[:-1000])


def incomplete_gguf(path: Path) -> None:
    gguf(path)
    (path / "model-Q4_K_M.gguf").rename(path / "model-Q4_K_M-00001-of-00002.gguf")


HUGE = {
    "hidden_size": 8192, "intermediate_size": 57344, "num_hidden_layers": 900, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
# Name -> how it is made, and words of the reason why it does not run; None = it runs.
MODELS: Mapping[str, tuple[Make, str | None]] = {
    "dense": (lambda path: make_checkpoint("llama", path), None),
    "sharded": (lambda path: make_checkpoint("qwen3", path, max_shard_size="60KB"), None),
    "windows": (lambda path: make_checkpoint("mistral", path), None),
    "mixture": (CASES["mixtral"].write, None),
    "linear attention": (CASES["qwen3_next"].write, None),
    "state space": (CASES["mamba"].write, None),
    "latent": (CASES["deepseek_v3"].write, None),
    "AWQ": (awq, None),
    "GGUF": (gguf, None),
    "GGUF cut off": (broken_gguf, "model-Q4_K_M.gguf"),
    "GGUF without a part": (incomplete_gguf, "model-Q4_K_M"),
    "class of transformers": (next(iter(THROUGH_TRANSFORMERS.values())).write, None),
    "broken config": (with_file("config.json", b'{"architectures": ['), "invalid JSON"),
    "unknown architecture": (edited("config.json", architectures=["NewModelForCausalLM"]), "NewModelForCausalLM"),
    "remote code": (
        edited("config.json", architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.Own"}),
        "OwnForCausalLM",
    ),
    "heads": (edited("config.json", num_key_value_heads=3), "does not divide"),
    "missing shard": (without("model-00002*"), "which is missing"),
    "truncated": (truncated, "safetensors"),
    "pickle only": (pickled, "only pytorch_model.bin"),
    "no tokenizer": (without("tokenizer.json"), "no tokenizer.json"),
    "broken tokenizer": (with_file("tokenizer.json", b"{}"), "tokenizer.json"),
    "vocabulary": (edited("config.json", vocab_size=999), "embed_tokens.weight"),
    "layers": (of_another_model, "layer"),
    "too large": (edited("config.json", **HUGE), "the model needs"),
    "unknown quantization": (edited("config.json", quantization_config={"quant_method": "new"}), "new"),
    "adapter": (lambda path: (path / "adapter_config.json").write_text("{}"), "no config.json"),
}


def inspected(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["inspect", "--json", *argv])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_before_loading_is_what_a_start_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make, reason = MODELS[name]
    path = tmp_path / "model"
    path.mkdir()
    make(path)
    status, found = inspected(capsys, str(path), *FLAGS)
    try:
        with LLM(str(path), **SETTINGS) as llm:
            assert llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=2), use_tqdm=False)
        problem = None
    except QuireError as error:
        problem = error
    said = found["problems"]
    assert found["runs_here"] == (problem is None) == (status == 0), (said, problem)
    assert (reason is None) == (problem is None)
    if problem is not None and reason is not None:
        assert reason in said[0]["message"] and said[0]["hint"]


def test_a_drafting_model_is_counted_with_its_weights_and_pages(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    plain = inspected(capsys, "leaf")[1]["memory"]
    drafting = inspected(capsys, "leaf", "--spec-method", "draft_model", "--spec-model", "leaf")[1]["memory"]
    assert plain["drafting_weights"] == 0 and drafting["drafting_weights"] == drafting["weights"] == plain["weights"]
    assert drafting["kv_cache_token"] == 2 * plain["kv_cache_token"] and drafting["kv_cache"] == 2 * plain["kv_cache"]
    assert drafting["workspace"] > plain["workspace"], "graphs of both, and logits of drafts"
    drawing = json.dumps({"method": "draft_model", "model": "leaf", "draft_sample_method": "probabilistic"})
    drawn = inspected(capsys, "leaf", "--speculative-config", drawing)[1]["memory"]
    assert drawn["workspace"] - drafting["workspace"] == 128 * 4 * 3072 * 4, "distributions of rows, drafts and tokens"
    heads = inspected(capsys, "leaf", "--spec-method", "eagle", "--spec-model", str(make_eagle(tmp_path)))[1]["memory"]
    assert heads["drafting_weights"] > 0
    assert plain["kv_cache_token"] < heads["kv_cache_token"] < drafting["kv_cache_token"]
    assert heads["total"] == heads["weights"] + heads["drafting_weights"] + heads["workspace"] + heads["kv_cache"]
    assert main(["inspect", "leaf", "--spec-method", "draft_model", "--spec-model", "leaf"]) == 0
    assert "MiB drafting model" in capsys.readouterr().out
    medusa = inspected(capsys, "leaf", "--spec-method", "medusa")[1]["memory"]
    assert 0 < medusa["drafting_weights"] < plain["weights"] / 10, "the heads that ship with leaf"


def test_the_report_names_sizes_and_what_a_load_takes(capsys: pytest.CaptureFixture[str]):
    status, found = inspected(capsys, "leaf", "--requests", "64", "--tokens", "512")
    assert status == 0 and found["architecture"] == "Qwen3ForCausalLM" and found["context_length"] == 2048
    need = found["memory"]
    one = inspected(capsys, "leaf", "--tokens", "512")[1]["memory"]
    assert need["total"] == need["weights"] + need["workspace"] + need["kv_cache"]
    block_bytes = 32 * need["kv_cache_token"]
    assert need["kv_cache"] == (64 * 16 + 1) * block_bytes and one["kv_cache"] == (16 + 1) * block_bytes
    assert need["fitting_requests"] == 128, "max_num_seqs"
    int4 = inspected(capsys, "leaf", "--quantization", "int4")[1]
    assert int4["memory"]["weights"] < 0.7 * need["weights"] and int4["settings"]["quantization"] == "int4"
    assert main(["inspect", "leaf", "--gpu-memory-utilization", "0.01"]) == 1
    text = capsys.readouterr().out
    assert "runs here     no: the model needs" in text and "hint: " in text
    assert main(["inspect", "leaf"]) == 0
    assert "runs here     yes, up to 128 requests of 2048 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["/nowhere/at all"], ["leaf", "--requests", "0"], ["leaf", "--tokens", "many"]])
def test_what_cannot_be_looked_at_is_a_mistake(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", *argv]) == 2
    assert capsys.readouterr().err.startswith("error: ")
