"""Model directories spoiled in one way each: name in words -> (what is done to a good one, words of the answer)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.e2e.tiny_model import HIDDEN, Tensors, config_json, layout, pack, tensors, tokenizer_json, write_json

Spoil = Callable[[Path], object]
BadModel = tuple[Spoil, tuple[str, ...]]


def config(**changes: Any) -> Spoil:
    """config.json with fields changed; None removes one."""

    def spoil(directory: Path) -> None:
        fields = {name: value for name, value in {**config_json(), **changes}.items() if value is not None}
        write_json(directory / "config.json", fields)

    return spoil


def text(name: str, content: str | bytes) -> Spoil:
    """File `name` with this content."""
    return lambda directory: (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)


def remove(*names: str) -> Spoil:
    """The directory without these files."""
    return lambda directory: [(directory / name).unlink() for name in names]


def folder(name: str) -> Spoil:
    """A directory where file `name` should be."""

    def spoil(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return spoil


def file_bytes(change: Callable[[bytes], bytes]) -> Spoil:
    """The weight file with its bytes changed."""

    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return spoil


def header(change: Callable[[dict[str, Any]], object], extra: bytes = b"") -> Spoil:
    """The weight file with its header changed and bytes behind its data."""

    def spoil(directory: Path) -> None:
        fields, data = layout(tensors())
        change(fields)
        (directory / "model.safetensors").write_bytes(pack(fields, data + extra))

    return spoil


def arrays(change: Callable[[Tensors], object]) -> Spoil:
    """The weight file with other tensors."""

    def spoil(directory: Path) -> None:
        held = tensors()
        change(held)
        (directory / "model.safetensors").write_bytes(pack(*layout(held)))

    return spoil


def index(shard: str | None, *, whole: Any = None) -> Spoil:
    """The weights moved to one shard with an index that says they are in `shard`, or an index that is `whole`."""

    def spoil(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
        content = {"weight_map": dict.fromkeys(tensors(), shard)} if whole is None else whole
        write_json(directory / "model.safetensors.index.json", content)

    return spoil


def duplicate_shards(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "a.safetensors")
    (directory / "b.safetensors").write_bytes((directory / "a.safetensors").read_bytes())


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """tokenizer.json with its object changed."""

    def spoil(directory: Path) -> None:
        content = tokenizer_json()
        change(content)
        write_json(directory / "tokenizer.json", content)

    return spoil


def offsets(name: str, begin: int, end: int) -> Callable[[dict[str, Any]], object]:
    return lambda fields: fields[name].update(data_offsets=[begin, end])


NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"

CONFIG_CASES: dict[str, BadModel] = {
    "no config": (remove("config.json"), ("config.json", "Hugging Face")),
    "config is a directory": (folder("config.json"), ("config.json",)),
    "config is not json": (text("config.json", "{"), ("config.json", "invalid JSON")),
    "config is a list": (text("config.json", "[]"), ("config.json", "object")),
    "config is huge": (text("config.json", '{"a": "' + "x" * (5 << 20) + '"}'), ("config.json", "bytes")),
    "config is nested without end": (text("config.json", '{"a":' + "[" * 200_000), ("config.json",)),
    "config holds nan": (text("config.json", '{"vocab_size": NaN}'), ("config.json", "NaN")),
    "config repeats a key": (text("config.json", '{"a": 1, "a": 2}'), ("config.json", "more than once")),
    "config is not text": (text("config.json", b"\xff\xfe\x00"), ("config.json",)),
    "unknown architecture": (config(architectures=["LlamaForCausalLMX"]), ("architecture", "LlamaForCausalLM")),
    "no architecture": (config(architectures=None, model_type=None), ("architectures", "LlamaForCausalLM")),
    "architecture in custom code only": (
        config(architectures=["EvilForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}),
        ("architecture", "EvilForCausalLM", "not implemented"),
    ),
    "no hidden size": (config(hidden_size=None), ("hidden_size",)),
    "hidden size as text": (config(hidden_size="16"), ("hidden_size",)),
    "hidden size as bool": (config(hidden_size=True), ("hidden_size",)),
    "no heads": (config(num_attention_heads=0), ("num_attention_heads",)),
    "heads that do not divide": (config(num_attention_heads=3, num_key_value_heads=3), ("hidden_size",)),
    "kv heads that do not divide": (
        config(num_attention_heads=4, num_key_value_heads=3), ("num_key_value_heads", "num_attention_heads"),
    ),
    "absurd hidden size": (config(hidden_size=2**40), ("hidden_size",)),
    "absurd number of layers": (config(num_hidden_layers=10**9), ("num_hidden_layers",)),
    "absurd vocabulary": (config(vocab_size=10**12), ("vocab_size",)),
    "absurd length": (config(max_position_embeddings=10**15), ("max_position_embeddings",)),
    "quantized checkpoint": (config(quantization_config={"quant_method": "quip"}), ("quantiz", "unquantized")),
    "unknown rope": (config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), ("rope_type", "yarn")),
    "negative rope factor": (config(rope_scaling={"rope_type": "linear", "factor": -2.0}), ("factor",)),
    "unknown activation": (config(hidden_act="wave"), ("hidden_act", "silu")),
    "end token outside the vocabulary": (config(eos_token_id=10**6), ("eos_token_id",)),
}  # fmt: skip

WEIGHT_CASES: dict[str, BadModel] = {
    "no weights at all": (remove("model.safetensors", "pytorch_model.bin"), ("safetensors", "download")),
    "pickled weights only": (remove("model.safetensors"), ("pytorch_model.bin", "does not open", "safetensors")),
    "weight file is a directory": (folder("model.safetensors"), ("model.safetensors",)),
    "weight file is empty": (file_bytes(lambda data: b""), ("model.safetensors", "download")),
    "header cut short": (file_bytes(lambda data: data[:5]), ("model.safetensors", "download")),
    "header longer than the file": (file_bytes(lambda data: data[:40]), ("model.safetensors", "header")),
    "header length absurd": (file_bytes(lambda d: struct.pack("<Q", 2**63) + d[8:]), ("header", "bytes")),
    "header is not json": (file_bytes(lambda data: pack(b"{" * 50, b"")), ("model.safetensors", "JSON")),
    "header nested without end": (file_bytes(lambda d: pack(b'{"a":' + b"[" * 200_000, b"")), ("model.safetensors",)),
    "header is a list": (file_bytes(lambda data: pack([], b"")), ("model.safetensors", "object")),
    "data cut short": (file_bytes(lambda data: data[:-100]), ("model.safetensors", "download")),
    "data too long": (file_bytes(lambda data: data + b"\0" * 100), ("model.safetensors", "100 bytes")),
    "tensors overlap": (header(offsets(NORM, 0, 4 * HIDDEN)), ("model.safetensors", "download")),
    "offset below zero": (header(offsets(NORM, -4, 4 * HIDDEN - 4)), (NORM, "data_offsets")),
    "end before begin": (header(offsets(NORM, 100, 36)), (NORM,)),
    "offset beyond the file": (header(offsets(NORM, 2**40, 2**40 + 4 * HIDDEN)), (NORM, "bytes")),
    "size that overflows": (header(lambda f: f[NORM].update(shape=[2**40, 2**40])), (NORM, "bytes")),
    "size that disagrees with the bytes": (header(lambda f: f[NORM].update(shape=[HIDDEN + 1])), (NORM, "bytes")),
    "negative dimension": (header(lambda f: f[NORM].update(shape=[-HIDDEN])), (NORM, "shape")),
    "unknown dtype": (header(lambda f: f[NORM].update(dtype="F4")), (NORM, "dtype")),
    "integer weights": (header(lambda f: f[NORM].update(dtype="I32")), (NORM, "unquantized")),
    "tensor entry is a text": (header(lambda f: f.update({NORM: "x"})), (NORM, "dtype")),
    "missing tensor": (arrays(lambda held: held.pop(NORM)), (NORM, "download")),
    "unexpected tensor": (
        arrays(lambda held: held.update({"model.x": np.zeros(3, np.float32)})), ("model.x", "config.json"),
    ),
    "tensor of a wrong shape": (arrays(lambda held: held.update({EMBED: held[EMBED][:-1]})), (EMBED, "config.json")),
    "index points out of the directory": (index("../../etc/passwd"), ("../../etc/passwd", "same directory")),
    "index points to an absolute path": (index("/etc/passwd"), ("/etc/passwd", "same directory")),
    "index names a missing shard": (index("model-00002-of-00002.safetensors"), ("00002", "missing")),
    "index names numbers": (index(None, whole={"weight_map": {NORM: 5}}), (NORM, "same directory")),
    "index without a map": (index(None, whole={"metadata": {}}), ("weight_map",)),
    "index that is a list": (index(None, whole=[1]), ("index.json",)),
    "index of other weights": (
        index(None, whole={"weight_map": {"model.other": "model-00001-of-00001.safetensors"}}), ("model.other",),
    ),
    "same tensor in two files": (duplicate_shards, ("a.safetensors", "b.safetensors")),
}  # fmt: skip

TOKENIZER_CASES: dict[str, BadModel] = {
    "no tokenizer": (remove("tokenizer.json"), ("tokenizer.json", "tokenizer=")),
    "tokenizer is not json": (text("tokenizer.json", "{"), ("tokenizer.json", "download")),
    "tokenizer is empty": (text("tokenizer.json", ""), ("tokenizer.json", "download")),
    "tokenizer is a directory": (folder("tokenizer.json"), ("tokenizer.json",)),
    "tokenizer without a model": (tokenizer(lambda content: content.pop("model")), ("tokenizer.json", "download")),
    "tokenizer of an unknown kind": (tokenizer(lambda c: c["model"].update(type="Magic")), ("tokenizer.json",)),
    "tokenizer config is not json": (text("tokenizer_config.json", "{"), ("tokenizer_config.json",)),
    "sentencepiece model is garbage": (
        lambda d: (remove("tokenizer.json")(d), text("tokenizer.model", b"\x00garbage" * 10)(d)), ("tokenizer.model",),
    ),
    "added token with an impossible id": (
        text("tokenizer_config.json", json.dumps({"added_tokens_decoder": {"999": {"content": "<x>"}}})), ("<x>",),
    ),
    "generation config is not json": (text("generation_config.json", "{"), ("generation_config.json",)),
    "generation config with a bad value": (
        text("generation_config.json", '{"temperature": "hot", "do_sample": true}'), ("temperature",),
    ),
}  # fmt: skip

BAD_MODELS = {**CONFIG_CASES, **WEIGHT_CASES, **TOKENIZER_CASES}

# Chat templates that are hostile or broken: the answer must come from the template engine, quickly.
BAD_TEMPLATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "not jinja": ("{% for %}", ("chat template",)),
    "class of a text": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ("chat template",)),
    "globals of a function": ("{{ raise_exception.__globals__['os'] }}", ("chat template",)),
    "attribute by filter": ("{{ ''|attr('__class__') }}", ("chat template",)),
    "format to reach attributes": ("{{ '{0.__class__.__mro__}'.format(1) }}", ("chat template",)),
    "import": ("{% import 'os' as os %}", ("chat template",)),
    "include a file": ("{% include '/etc/passwd' %}", ("chat template",)),
    "endless loop": ("{% for a in range(10**9) %}{% endfor %}", ("chat template",)),
    "nested loops": (
        "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}x{% endfor %}{% endfor %}"
        "{% endfor %}",
        ("chat template",),
    ),
    "huge text": ("{{ 'x' * 10**12 }}", ("chat template",)),
    "doubling text": ("{% set ns = namespace(t='x') %}{% for i in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
                      ("chat template",)),
    "huge number": ("{{ (9 ** 999) ** 999 }}", ("chat template",)),
    "huge width": ("{{ '%999999999999d' % 1 }}", ("chat template",)),
    "endless recursion": (
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ("chat template", "nests more than 50 calls"),
    ),
    "endless recursive loop": (
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        ("chat template", "nests more than 50 calls"),
    ),
    "endless callers": (
        "{% macro f(x) %}{{ caller(x) }}{% endmacro %}"
        "{% macro g(x) %}{% call(y) f(x) %}{{ g(y) }}{% endcall %}{% endmacro %}{{ g(1) }}",
        ("chat template", "nests more than 50 calls"),
    ),
    "refuses the messages": ("{{ raise_exception('only cats') }}", ("only cats",)),
}  # fmt: skip
