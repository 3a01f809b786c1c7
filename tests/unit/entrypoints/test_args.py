from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import QuireConfig
from quire.config.build import all_settings
from quire.config.resolve import Decision
from quire.core.sampling_params import SamplingParams
from quire.entrypoints.args import (
    QuireParser,
    add_engine_arguments,
    build_config,
    config_from_args,
    describe_config,
    flag_of,
    parse_size,
)
from quire.entrypoints.reference import REFERENCE_DIR, reference_pages
from quire.errors import ConfigError, QuireClientError, UnsupportedError


def parse(*argv: str) -> QuireConfig:
    parser = QuireParser(prog="quire test")
    parser.add_argument("prompts", nargs="*")
    add_engine_arguments(parser)
    return config_from_args(parser.parse_args(list(argv)))


def test_no_flags_give_the_defaults() -> None:
    assert parse() == QuireConfig()


def test_flags_of_every_type() -> None:
    config = parse(
        "--model", "m", "--max-model-len", "2k", "--gpu-memory-utilization=0.5", "--no-enable-prefix-caching",
        "--dtype", "float32", "-tp", "1", "--max-logprobs", "-1", "--enable-chunked-prefill", "a prompt",
    )  # fmt: skip
    assert config == build_config(
        model="m", max_model_len=2000, gpu_memory_utilization=0.5, enable_prefix_caching=False, dtype="float32",
        max_logprobs=-1,
    )  # fmt: skip


def test_every_setting_has_a_flag_and_a_line_of_help() -> None:
    parser = QuireParser(prog="quire test")
    add_engine_arguments(parser)
    text = parser.format_help()
    for setting in all_settings():
        assert flag_of(setting.info.name) in text


BAD_FLAGS = {
    "misspelt": (["--max-modle-len", "5"], ConfigError, "did you mean '--max-model-len'"),
    "misspelt with equals": (["--dtyp=float32"], ConfigError, "did you mean '--dtype'"),
    "abbreviated": (["--max-model", "5"], ConfigError, "did you mean '--max-model-len'"),
    "misspelt negation": (["--no-enable-prefix-cachin"], ConfigError, "--no-enable-prefix-caching"),
    "text for a number": (["--max-num-seqs", "many"], ConfigError, "max_num_seqs takes an integer"),
    "fraction for a count": (["--max-num-seqs", "1.5"], ConfigError, "max_num_seqs takes an integer"),
    "not a number": (["--gpu-memory-utilization", "nan"], ConfigError, "gpu_memory_utilization takes"),
    "out of range": (["--gpu-memory-utilization", "3"], ConfigError, "gpu_memory_utilization takes"),
    "not a choice": (["--dtype", "fp8"], ConfigError, "use one of auto"),
    "missing value": (["--max-num-seqs"], ConfigError, "--help"),
    "not supported yet": (["--enable-lora"], UnsupportedError, "leave out enable_lora"),
    "not supported yet with a value": (["--stream-interval", "4"], UnsupportedError, "leave out stream_interval"),
    "not supported yet with json": (["--lora-dtype", '{"a": 1}'], UnsupportedError, "leave out lora_dtype"),
}


@pytest.mark.parametrize(("argv", "error", "hint"), BAD_FLAGS.values(), ids=BAD_FLAGS.keys())
def test_a_bad_flag_is_refused_with_the_fix(argv: list[str], error: type[QuireClientError], hint: str) -> None:
    with pytest.raises(error) as caught:
        parse(*argv)
    assert hint in str(caught.value)


def test_neutral_values_of_flags_not_supported_yet_are_accepted() -> None:
    neutral = ("--disable-custom-all-reduce", "--no-enable-lora", "--stream-interval", "1", "-n", "1", "prompt")
    assert parse(*neutral, "--trust-remote-code", "-dpl", "1") == QuireConfig()
    assert parse("-dp", "2", "-dpl", "2").parallel.data_parallel_size == 2
    assert parse("--enforce-eager", "prompt").model.enforce_eager


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_config_file_gives_settings_and_flags_win(tmp_path: Path) -> None:
    file = write(tmp_path / "c.json", json.dumps({"max-model-len": 64, "dtype": "float32", "max_num_seqs": 3}))
    config = parse("--config", file, "--max-model-len", "32")
    assert config == build_config(max_model_len=32, dtype="float32", max_num_seqs=3)


def test_a_config_file_may_be_yaml(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "max-model-len: 64\ndtype: float32  # exact\nenable_prefix_caching: false\n")
    assert parse("--config", file) == build_config(max_model_len=64, dtype="float32", enable_prefix_caching=False)


def test_defaults_of_a_command_lose_against_the_file(tmp_path: Path) -> None:
    parser = QuireParser(prog="quire test")
    add_engine_arguments(parser)
    args = parser.parse_args(["--config", write(tmp_path / "c.json", '{"dtype": "float32"}')])
    assert config_from_args(args, dtype="bfloat16", seed=7) == build_config(dtype="float32", seed=7)


BAD_FILES = {
    "not json": ("c.json", "{", "not JSON"),
    "not an object": ("c.json", "[1]", "is not an object"),
    "unknown key": ("c.json", '{"max-modle-len": 5}', "did you mean 'max_model_len'"),
    "wrong type": ("c.json", '{"max_model_len": "5"}', "must be an integer"),
    "given twice": ("c.json", '{"max_model_len": 5, "max-model-len": 6}', "twice"),
    "toml": ("c.toml", "dtype = 'float32'", "toml is not supported"),
    "yaml that is none": ("c.yaml", "dtype: [", "not YAML"),
    "yaml that is a list": ("c.yml", "- dtype", "not a mapping"),
    "yaml with an object": ("c.yaml", "dtype: !!python/object/apply:os.system [ls]", "not YAML"),
    "yaml with a name twice": ("c.yaml", "max_num_seqs: 3\nmax-num-seqs: 4", "twice"),
    "yaml with a key twice": ("c.yaml", "max_num_seqs: 3\nmax_num_seqs: 4", "twice"),
    "yaml bomb": ("c.yaml", "a: &a [x, x]\nb: &b [*a, *a]", "aliases"),
    "deep yaml": ("c.yaml", "a: " + "[" * 50_000, "too deep"),
    "not text": ("c.json", "\udcff", "not JSON"),
    "huge": ("c.json", " " * (1 << 20) + "{}", "larger than 1 MiB"),
    "deep": ("c.json", "[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_config_file_is_refused_in_words(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        parse("--config", str(file))


def test_a_config_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            parse("--config", str(path))


@pytest.mark.parametrize(
    ("text", "value"),
    [("16", 16), ("16k", 16000), ("16K", 16384), ("1.5k", 1500), ("2GiB", 2 << 30), ("1MB", 1 << 20), ("-1", -1)],
)
def test_sizes_with_units(text: str, value: int) -> None:
    assert parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1x", "0.0001k", "infk", "1e3"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises((ValueError, OverflowError)):
        parse_size(text)


@given(st.text())
def test_any_text_is_a_size_or_refused_by_name(text: str) -> None:
    try:
        parse(f"--max-model-len={text}")
    except ConfigError as error:
        assert error.field == "max_model_len" and error.hint


def test_print_config_shows_what_was_chosen_and_why() -> None:
    text = describe_config(build_config(max_model_len=5), [Decision("block_size", 16, "preferred by the backend")])
    lines = {line.split()[0]: line for line in text.splitlines()}
    assert len(lines) == len(all_settings())
    assert "auto: preferred by the backend" in lines["block_size"]
    assert lines["max_model_len"].split() == ["max_model_len", "5"]


def test_the_reference_pages_are_what_the_command_prints() -> None:
    """In a process of its own: what this one has imported makes no difference to a page."""
    command = [sys.executable, "-m", "quire.entrypoints.args"]
    printed = subprocess.run(command, cwd=REFERENCE_DIR.parents[1], capture_output=True, text=True, check=True).stdout
    written = "".join((REFERENCE_DIR / name).read_text() for name in reference_pages())
    assert printed == written, "run: python -m quire.entrypoints.args --write-docs"
    kinds = ("quire:core_", "quire:tenant_", "quire:step_", "quire:front_end", "quire:replicas_", "vllm:spec_decode_")
    assert all(f"| `{kind}" in written for kind in kinds), "metrics of parts that not every server has"


def test_every_sampling_parameter_is_on_its_page() -> None:
    page = reference_pages()["sampling-parameters.md"]
    internal = ("bad_words_token_ids", "reasoning")
    assert all(f"`{name}`" in page for name in SamplingParams.__struct_fields__ if name not in internal)
