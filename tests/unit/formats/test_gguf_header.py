"""The header of a GGUF file: what is read of a right one, and 45 wrong ones that are refused by field, with the fix."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import numpy as np
import pytest

from quire.errors import WeightsError
from quire.formats.gguf_file import GGUFFile
from quire.formats.gguf_header import MAX_ARRAY_STRINGS, MAX_KEYS, MAX_TENSORS, GGUFStrings, read_header
from tests.unit.formats.gguf_bytes import (
    ARCHITECTURE,
    ARRAY,
    BLOCKS,
    BOOL,
    FLOAT32,
    INT32,
    Q4_K,
    Q8_0,
    SCORES,
    STRING,
    TOKENS,
    UINT8,
    UINT32,
    UINT64,
    Parts,
    array,
    pair,
    string,
    tensor,
    text,
    u32,
    u64,
)

GOOD = Parts().file()
# Of any file, however wrong it is; the slowest takes a tenth of that here.
MAX_SECONDS = 2.0


def test_metadata_and_tensors_are_read():
    header = read_header(GOOD, "x.gguf")
    assert header.version == 3
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 2
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, GGUFStrings)
    assert (len(tokens), list(tokens), tokens[2], tokens[-1], tokens[0:2]) == (3, ["a", "b", "é"], "é", "é", ["a", "b"])
    scores = header.metadata["tokenizer.ggml.scores"]
    assert isinstance(scores, np.ndarray)
    assert scores.tolist() == [-1.5] * 3
    assert not scores.flags.writeable
    first, second = header.tensors.values()
    assert (first.name, first.shape, first.format.name, first.num_bytes) == ("a.weight", (3, 4), "F32", 48)
    assert (second.shape, second.format.name, second.num_bytes) == ((2, 32), "Q8_0", 68)
    assert second.offset - first.offset == 64


def test_every_type_of_value_is_read():
    kinds = [(0, "<B", 7), (1, "<b", -7), (2, "<H", 700), (3, "<h", -700), (4, "<I", 70000), (5, "<i", -70000),
             (6, "<f", 0.5), (10, "<Q", 1 << 40), (11, "<q", -(1 << 40)), (12, "<d", 0.1)]  # fmt: skip
    pairs = [pair(f"scalar.{kind}", kind, struct.pack(code, value)) for kind, code, value in kinds]
    pairs += [pair(f"array.{kind}", ARRAY, array(kind, [struct.pack(code, value)] * 2)) for kind, code, value in kinds]
    pairs += [pair("yes", BOOL, b"\1"), pair("both", ARRAY, array(BOOL, [b"\0", b"\1"]))]
    pairs += [pair("none", ARRAY, array(FLOAT32, [])), pair("no.strings", ARRAY, array(STRING, []))]
    metadata = read_header(Parts(pairs=tuple(pairs)).file(), "x").metadata
    for kind, _, value in kinds:
        assert metadata[f"scalar.{kind}"] == value
        assert list(metadata[f"array.{kind}"]) == [value, value]  # type: ignore[arg-type]
    assert metadata["yes"] is True
    assert metadata["both"].tolist() == [False, True]  # type: ignore[union-attr]
    assert len(metadata["none"]) == len(metadata["no.strings"]) == 0  # type: ignore[arg-type]
    assert list(metadata["no.strings"]) == []  # type: ignore[arg-type]


def test_version_2_and_another_alignment_are_read():
    aligned = pair("general.alignment", UINT32, u32(64))
    parts = Parts(version=u32(2), pairs=(ARCHITECTURE, aligned), alignment=64)
    first, second = read_header(parts.file(), "x").tensors.values()
    assert (first.offset % 64, second.offset - first.offset) == (0, 64)


def test_a_large_vocabulary_is_found_without_being_decoded():
    """The strings lie where they are until somebody asks; what is wrong in one is told then, by its number."""
    tokens = [string(f"token {number}") for number in range(250_000)]
    tokens[77] = string(b"\xff")
    data = Parts(pairs=(pair("tokenizer.ggml.tokens", ARRAY, array(STRING, tokens)),)).file()
    started = time.process_time()
    found = read_header(data, "x.gguf").metadata["tokenizer.ggml.tokens"]
    assert time.process_time() - started < MAX_SECONDS
    assert isinstance(found, GGUFStrings)
    assert (len(found), found[76], found[-1]) == (250_000, "token 76", "token 249999")
    with pytest.raises(WeightsError, match=r"string 77 of tokenizer\.ggml\.tokens is not UTF-8"):
        list(found)


def kv(*pairs: bytes) -> bytes:
    return Parts(pairs=pairs).file()


def tensors(*entries: bytes, data: int = 132) -> bytes:
    return Parts(tensors=entries, data=bytes(data)).file()


def nested(depth: int) -> bytes:
    """An array of arrays of arrays."""
    value = array(UINT8, [b"\0"])
    for _ in range(depth):
        value = array(ARRAY, [value])
    return pair("deep", ARRAY, value)


# What is wrong -> the file, the field that the error names, and a part of the message.
BROKEN: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "x.gguf", "is empty"),
    "one byte": (b"G", "header", "needs 24 bytes"),
    "another format": (b"PK\3\4" + GOOD[4:], "magic", "not a GGUF file"),
    "lower case magic": (Parts(magic=b"gguf").file(), "magic", "not a GGUF file"),
    "version 1": (Parts(version=u32(1)).file(), "version", "versions 2 and 3"),
    "a version to come": (Parts(version=u32(4)).file(), "version", "versions 2 and 3"),
    "big-endian": (Parts(version=struct.pack(">I", 3)).file(), "version", "big-endian"),
    "more tensors than bytes": (Parts(num_tensors=4000).file(), "tensor_count", "bytes follow"),
    "too many tensors": (Parts(num_tensors=MAX_TENSORS + 1).file(), "tensor_count", "at most"),
    "negative tensors": (Parts(num_tensors=(1 << 64) - 1).file(), "tensor_count", "at most"),
    "more keys than bytes": (Parts(num_pairs=5000).file(), "metadata_kv_count", "bytes follow"),
    "too many keys": (Parts(num_pairs=MAX_KEYS + 1).file(), "metadata_kv_count", "at most"),
    "one key too many": (Parts(num_pairs=5).file(), "", ""),
    "one tensor too many": (Parts(num_tensors=3).file(), "", ""),
    "cut in a key": (GOOD[:30], "tensor_count", "bytes follow"),
    "cut in the vocabulary": (GOOD[:150], "", ""),
    "cut in the table of tensors": (GOOD[: GOOD.index(b"b.weight") + 10], "", ""),
    "cut in the data": (GOOD[:-1], "b.weight", "of the data, which has"),
    "without data": (GOOD[: -len(Parts().data)], "a.weight", "of the data, which has 0"),
    "huge key": (kv(string("k", num_bytes=1 << 40)), "metadata key 0", "at most 1024"),
    "huge string": (kv(pair("name", STRING, string("x", num_bytes=1 << 62))), "name", "at most"),
    "string beyond the file": (kv(pair("name", STRING, string("x", num_bytes=10_000))), "name", "the file has"),
    "empty key": (kv(pair("", UINT8, b"\0")), "metadata key 0", "is called ''"),
    "key with a line break": (kv(pair("a\nb", UINT8, b"\0")), "metadata key 0", "is called"),
    "key that is not text": (kv(pair(b"\xff", UINT8, b"\0")), "metadata key 0", "UTF-8"),
    "value that is not text": (kv(pair("name", STRING, string(b"\xc3"))), "name", "UTF-8"),
    "a key twice": (kv(BLOCKS, BLOCKS), "llama.block_count", "more than once"),
    "type that is not defined": (kv(pair("k", 13, u64(0))), "k", "type 13"),
    "type of an array that is not": (kv(pair("k", ARRAY, array(99, [b"\0"]))), "k", "type 99"),
    "truth value of 2": (kv(pair("k", BOOL, b"\2")), "k", "truth value of 2"),
    "truth value of 2 in an array": (kv(pair("k", ARRAY, array(BOOL, [b"\1", b"\2"]))), "k", "truth value of 2"),
    "array of arrays": (kv(nested(1)), "deep", "array of arrays"),
    "arrays 10,000 deep": (kv(nested(2000)), "deep", "array of arrays"),
    "array beyond the file": (kv(pair("k", ARRAY, array(FLOAT32, [], 1 << 20))), "k", "bytes follow"),
    "array whose size overflows": (kv(pair("k", ARRAY, array(UINT64, [], 1 << 61))), "k", "at most"),
    "strings beyond the file": (kv(pair("k", ARRAY, array(STRING, [string("a")], 100))), "k", ""),
    "too many strings": (kv(pair("k", ARRAY, array(STRING, [], MAX_ARRAY_STRINGS + 1))), "k", "at most"),
    "string of an array beyond the file": (
        kv(pair("k", ARRAY, array(STRING, [string("a"), string("b", num_bytes=1 << 63), string("c")]))),
        "k",
        "string 1 of 3",
    ),
    "alignment 0": (kv(pair("general.alignment", UINT32, u32(0))), "general.alignment", "power of two"),
    "alignment 48": (kv(pair("general.alignment", UINT32, u32(48))), "general.alignment", "power of two"),
    "alignment of a gigabyte": (kv(pair("general.alignment", UINT32, u32(1 << 30))), "general.alignment", "at most"),
    "negative alignment": (kv(pair("general.alignment", INT32, u32(0xFFFFFFE0))), "general.alignment", "power of two"),
    "alignment in words": (kv(text("general.alignment", "32")), "general.alignment", "power of two"),
    "a tensor twice": (tensors(tensor("a", [4]), tensor("a", [4], offset=32)), "a", "more than once"),
    "tensor without a name": (tensors(tensor("", [4])), "tensor 0", "is called"),
    "no dimensions": (tensors(tensor("a", [])), "a", "0 dimensions"),
    "five dimensions": (tensors(tensor("a", [1] * 5)), "a", "5 dimensions"),
    "four billion dimensions": (tensors(string("a") + u32(0xFFFFFFFF) + bytes(64)), "a", "dimensions"),
    "size 0": (tensors(tensor("a", [4, 0])), "a", "shape [0, 4]"),
    "size beyond the file": (tensors(tensor("a", [1 << 63])), "a", "more than the file holds"),
    "sizes whose product overflows": (tensors(tensor("a", [256] * 4)), "a", "of the data, which has"),
    "row that is not whole blocks": (tensors(tensor("a", [48], Q8_0)), "a", "blocks of 32 (Q8_0)"),
    "row of half a superblock": (tensors(tensor("a", [128], Q4_K)), "a", "blocks of 256 (Q4_K)"),
    "type of tensor that is not defined": (tensors(tensor("a", [4], 4711)), "a", "type 4711"),
    "type of tensor that is not read": (tensors(tensor("a", [256], 16)), "a", "IQ2_XXS"),
    "offset that is not aligned": (tensors(tensor("a", [4], offset=8)), "a", "multiple of 32"),
    "offset beyond the file": (tensors(tensor("a", [4], offset=1 << 50)), "a", "of the data, which has"),
    "offset that overflows": (tensors(tensor("a", [4], offset=(1 << 64) - 32)), "a", "of the data, which has"),
    "tensors that overlap": (tensors(tensor("a", [16]), tensor("b", [4], offset=32)), "b", "overlaps a"),
    "zeros": (bytes(4096), "magic", "not a GGUF file"),
}


@pytest.mark.parametrize(("data", "field", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_refused_by_field_with_the_fix(tmp_path: Path, data: bytes, field: str, said: str):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(WeightsError) as caught:
        GGUFFile(path)
    assert time.process_time() - started < MAX_SECONDS
    assert str(path) in caught.value.message
    assert said in str(caught.value)
    assert caught.value.hint
    assert caught.value.field
    if field:
        assert caught.value.field == field


def test_the_worst_headers_take_less_than_two_seconds():
    """As many strings, keys and tensors as are read at all."""
    strings = bytes(8 * MAX_ARRAY_STRINGS)
    many_strings = Parts(pairs=(string("k") + u32(ARRAY) + u32(STRING) + u64(MAX_ARRAY_STRINGS) + strings,)).file()
    many_keys = Parts(pairs=tuple(pair(f"key {number}", UINT8, b"\0") for number in range(MAX_KEYS))).file()
    entries = tuple(tensor(f"t{number}", [4], offset=32 * number) for number in range(MAX_TENSORS))
    many_tensors = Parts(tensors=entries, data=bytes(32 * MAX_TENSORS)).file()
    for data in (many_strings, many_keys, many_tensors):
        started = time.process_time()
        read_header(data, "x.gguf")
        assert time.process_time() - started < MAX_SECONDS


def test_the_table_covers_what_was_asked():
    assert len(BROKEN) >= 40
    assert TOKENS in GOOD
    assert SCORES in GOOD
