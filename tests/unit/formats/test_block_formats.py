"""The table of GGUF's tensor types agrees with that of the `gguf` package."""

from __future__ import annotations

import gguf
import pytest

from quire.formats.block_formats import BLOCK_FORMATS, BLOCK_FORMATS_BY_NUMBER, OTHER_TYPES, type_name


@pytest.mark.parametrize("kind", BLOCK_FORMATS.values(), ids=lambda kind: kind.name)
def test_blocks_are_as_large_as_ggml_has_them(kind):
    number = gguf.GGMLQuantizationType(kind.number)
    assert number.name == kind.name
    assert gguf.GGML_QUANT_SIZES[number] == (kind.block_size, kind.block_bytes)
    assert kind.row_bytes(3 * kind.block_size) == 3 * kind.block_bytes


def test_every_type_that_ggml_names_has_its_name():
    for number in gguf.GGMLQuantizationType:
        assert type_name(int(number)) == number.name


def test_a_type_is_read_or_not():
    assert not BLOCK_FORMATS_BY_NUMBER.keys() & OTHER_TYPES.keys()
    assert type_name(12) == "Q4_K"
    assert type_name(16) == "IQ2_XXS"
    assert type_name(4096) == "unknown type 4096"


def test_rows_of_half_blocks_are_refused():
    with pytest.raises(ValueError, match="a row of 300 numbers is not a multiple of the 256 of Q4_K"):
        BLOCK_FORMATS["Q4_K"].row_bytes(300)
