"""GGUF files on disk: tensors' bytes, split files, the one model of a directory, and damage at random."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ModelError, WeightsError
from quire.formats.gguf_file import GGUFFile, find_gguf
from tests.robustness.fuzz_gguf import run, undamaged
from tests.unit.formats.gguf_bytes import ARCHITECTURE, INT32, UINT32, Parts, pair, tensor, u32


def part(number: int, count: int, names: list[str], *, total: int = 3, num_parts: int | None = None) -> bytes:
    """A part of a split file: the first has the model's metadata."""
    split = (
        pair("split.no", UINT32, u32(number)),
        pair("split.count", UINT32, u32(count if num_parts is None else num_parts)),
        pair("split.tensors.count", INT32, u32(total)),
    )
    entries = tuple(tensor(name, [8], offset=32 * place) for place, name in enumerate(names))
    data = b"".join(np.full(8, ord(name[0]), "<f4").tobytes() for name in names)
    return Parts(pairs=(ARCHITECTURE, *split) if number == 0 else split, tensors=entries, data=data).file()


def write_parts(directory: Path, **changed: bytes) -> list[Path]:
    parts = {"1": part(0, 3, ["a"]), "2": part(1, 3, ["b"]), "3": part(2, 3, ["c"]), **changed}
    paths = []
    for number, data in parts.items():
        paths.append(directory / f"m-0000{number}-of-00003.gguf")
        paths[-1].write_bytes(data)
    return paths


def test_the_bytes_of_a_tensor_are_those_of_the_file(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(Parts(data=bytes(range(132))).file())
    file = GGUFFile(path)
    assert bytes(file.data("a.weight")) == bytes(range(48))
    file.release("a.weight")
    assert bytes(file.data("b.weight")) == bytes(range(64, 132))
    assert (file.size, len(file.parts), file.part_of("a.weight").path) == (path.stat().st_size, 1, path)


def test_any_part_gives_the_whole_model(tmp_path: Path):
    for path in write_parts(tmp_path):
        file = GGUFFile(path)
        assert list(file.tensors) == ["a", "b", "c"]
        assert file.metadata["general.architecture"] == "llama"
        assert np.frombuffer(file.data("c"), "<f4").tolist() == [float(ord("c"))] * 8


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"2": part(2, 3, ["b"])}, "split.no"),
        ({"2": part(1, 4, ["b"])}, "split.count"),
        ({"2": part(1, 3, ["a"])}, "a"),
        ({"3": part(2, 3, [])}, "split.tensors.count"),
        ({"1": part(0, 3, ["a"], total=9)}, "split.tensors.count"),
        ({"3": Parts().file()}, "split.count"),
        ({"3": b"GGUF"}, "header"),
    ],
    ids=["order", "count", "twice", "lacking", "other total", "whole", "broken"],
)
def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path, changed: dict[str, bytes], field: str):
    first = write_parts(tmp_path, **changed)[0]
    with pytest.raises(WeightsError) as caught:
        GGUFFile(first)
    assert caught.value.field == field
    assert caught.value.hint


def test_a_missing_part_is_named(tmp_path: Path):
    write_parts(tmp_path)[1].unlink()
    with pytest.raises(WeightsError, match=r"one of 3 parts; missing: m-00002-of-00003\.gguf"):
        GGUFFile(tmp_path / "m-00001-of-00003.gguf")


def test_a_part_under_another_name_is_refused(tmp_path: Path):
    path = tmp_path / "renamed.gguf"
    path.write_bytes(part(0, 3, ["a"]))
    with pytest.raises(WeightsError, match=r"split\.count is 3") as caught:
        GGUFFile(path)
    assert "NAME-00001-of-00003.gguf" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-00001-of-99999.gguf"])
def test_numbers_of_parts_are_checked(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(Parts().file())
    with pytest.raises(WeightsError, match="is called as part"):
        GGUFFile(tmp_path / name)


def test_what_is_no_file_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "directory.gguf").mkdir()
    for name in ("gone.gguf", "pipe.gguf", "directory.gguf"):
        with pytest.raises(WeightsError) as caught:
            GGUFFile(tmp_path / name)
        assert caught.value.field == name


def test_the_one_model_of_a_directory_is_found(tmp_path: Path):
    assert find_gguf(tmp_path) is None
    first, *_ = write_parts(tmp_path)
    (tmp_path / "mmproj-m.gguf").write_bytes(Parts().file())
    assert find_gguf(tmp_path) == first
    (tmp_path / "m-Q8_0.gguf").write_bytes(Parts().file())
    with pytest.raises(ModelError, match="2 GGUF models") as caught:
        find_gguf(tmp_path)
    assert "name one of them" in str(caught.value.hint)


def test_random_damage_is_refused_or_harmless():
    """`make fuzz-gguf` runs 100,000 cases."""
    undamaged()
    assert run(1500, seed=20261123) == 0
