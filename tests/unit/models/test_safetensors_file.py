"""Reading one safetensors file: what `safetensors` writes, and every way a file can lie about itself."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from quire.errors import WeightsError
from quire.models.safetensors_file import SafetensorsFile
from quire.models.safetensors_header import MAX_HEADER_BYTES

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write(path: Path, header: object, data: bytes = bytes(8), header_size: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_size is None else header_size) + text + data)
    return path


def changed(**fields: Any) -> dict[str, Any]:
    return {"w": {name: value for name, value in {**ENTRY, **fields}.items() if value is not ...}}


def test_tensors_of_every_float_type_come_back_bit_for_bit(tmp_path: Path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c.d": torch.randn(2, 1, 2).half(),
        "e": torch.randn(1).double(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "mask": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.entries) == set(tensors)
    for name, tensor in tensors.items():
        found = file.tensor(name)
        assert found.dtype == tensor.dtype and found.shape == tensor.shape and torch.equal(found, tensor)


def test_a_tensor_outlives_the_file_object_and_writing_to_it_leaves_the_file_alone(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(4)}, path)
    before = path.read_bytes()
    tensor = SafetensorsFile(path).tensor("w")
    tensor += 1
    assert tensor.tolist() == [2.0] * 4 and path.read_bytes() == before


def test_unaligned_data_is_read(tmp_path: Path):
    for padding in range(1, 5):
        header = json.dumps(changed()).encode() + b" " * padding
        path = write(tmp_path / f"{padding}.safetensors", header, struct.pack("<2f", 1.5, -2.0))
        assert SafetensorsFile(path).tensor("w").tolist() == [1.5, -2.0]


BAD_HEADERS: dict[str, tuple[object, str]] = {
    "not json": (b"{", "invalid JSON"),
    "not utf-8": (b"\xff\xfe{}", "invalid JSON"),
    "a list": ([], "must be a JSON object"),
    "nested deeply": (b'{"w":' + b"[" * 200_000, "nested too deeply"),
    "a number of 5000 digits": (b'{"w": ' + b"9" * 5000 + b"}", "invalid JSON"),
    "NaN": (b'{"w": NaN}', "not a JSON number"),
    "a name twice": (b'{"w": {}, "w": {}}', "'w' appears more than once"),
    "an entry no object": ({"w": 3}, "lacks dtype"),
    "no dtype": (changed(dtype=...), "lacks dtype"),
    "no offsets": (changed(data_offsets=...), "lacks dtype"),
    "unknown dtype": (changed(dtype="F33"), "dtype 'F33'"),
    "dtype a list": (changed(dtype=["F32"]), "dtype"),
    "shape no list": (changed(shape=2), "has shape 2"),
    "negative size": (changed(shape=[-2, -1]), "has shape"),
    "fractional size": (changed(shape=[2.0]), "has shape"),
    "boolean size": (changed(shape=[True, 2]), "has shape"),
    "huge sizes": (changed(shape=[2**62, 2**62]), "has shape"),
    "product overflows": (changed(shape=[2**40, 2**40]), "needs"),
    "many dimensions": (changed(shape=[1] * 9), "has shape"),
    "one offset": (changed(data_offsets=[0]), "data_offsets"),
    "offsets a text": (changed(data_offsets="08"), "data_offsets"),
    "negative offset": (changed(data_offsets=[-8, 0]), "data_offsets"),
    "offsets reversed": (changed(data_offsets=[8, 0]), "bytes 8 to 0"),
    "offset past the end": (changed(shape=[4], data_offsets=[0, 16]), "which has 8"),
    "shape larger than the bytes": (changed(shape=[3]), "needs 12 bytes"),
    "shape smaller than the bytes": (changed(shape=[1]), "needs 4 bytes"),
    "overlap": ({"w": ENTRY, "v": ENTRY}, "overlaps"),
    "hole": (changed(shape=[1], data_offsets=[4, 8]), "hole before it"),
    "bytes after": (changed(shape=[1], data_offsets=[0, 4]), "4 bytes after"),
    "no tensors but data": ({}, "8 bytes after"),
}


@pytest.mark.parametrize(("header", "said"), BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_a_false_header_is_refused_naming_the_file_and_the_fix(tmp_path: Path, header: object, said: str):
    path = write(tmp_path / "model.safetensors", header)
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(path)
    assert said in str(caught.value) and "model.safetensors" in str(caught.value) and caught.value.hint


@pytest.mark.parametrize("size", [0, 1, 7], ids="{} bytes".format)
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, size: int):
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(WeightsError, match="too few for a header"):
        SafetensorsFile(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("header_size", "said"), [(2**63, "claims a header"), (1000, "header needs 1000")])
def test_a_header_larger_than_the_file_is_refused(tmp_path: Path, header_size: int, said: str):
    with pytest.raises(WeightsError, match=said):
        SafetensorsFile(write(tmp_path / "x.safetensors", changed(), header_size=header_size))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path):
    save_file({"a": torch.ones(4), "b": torch.ones(2, 3)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:length])
        with pytest.raises(WeightsError):
            SafetensorsFile(tmp_path / "cut.safetensors")


def test_what_is_no_regular_file_is_refused_without_reading_it(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "dir.safetensors").mkdir()
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "gone")
    for name in ("pipe", "dir", "dangling"):
        with pytest.raises(WeightsError, match=name):
            SafetensorsFile(tmp_path / f"{name}.safetensors")


def test_a_header_of_very_many_tensors_is_refused(tmp_path: Path):
    entry = b'"%07d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
    count = MAX_HEADER_BYTES // len(entry % 0)
    text = b"{" + b"".join(entry % i for i in range(count - 1)) + b'"x":1}'
    with pytest.raises(WeightsError, match=r"claims \d+ tensors"):
        SafetensorsFile(write(tmp_path / "x.safetensors", text))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)
OFFSETS = st.lists(st.integers(-2, 40), min_size=2, max_size=2)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F64"]) | JSON,
        "shape": st.lists(st.integers(0, 5), max_size=3) | JSON,
        "data_offsets": OFFSETS | JSON,
    }
)


@settings(deadline=None, max_examples=400)
@given(header=st.dictionaries(st.text(max_size=5), ENTRIES | JSON, max_size=4), data=st.binary(max_size=48))
def test_any_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, header: object, data: bytes):
    path = write(tmp_path_factory.getbasetemp() / "fuzz.safetensors", header, data)
    try:
        file = SafetensorsFile(path)
    except WeightsError:
        return
    for name, entry in file.entries.items():
        assert file.tensor(name).shape == entry.shape


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_a_damaged_byte_is_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    save_file({"a": torch.ones(4), "b": torch.ones(2, 3)}, path)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except WeightsError:
        return
    assert sum(file.tensor(name).nbytes for name in file.entries) < len(content)
