from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.native import sampling as native
from quire.kernels.native.runtime import NativeRuntime
from quire.sample.rng import philox4x32, uniform

# Published with Random123 (Salmon et al. 2011): key, counter, result.
KNOWN_ANSWERS = {
    "zeros": ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize("name", KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(name: str) -> None:
    key, counter, expected = (np.array(words, dtype=np.uint64)[:, None] for words in KNOWN_ANSWERS[name])
    assert philox4x32(key, counter).tolist() == expected.tolist()


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    seeds = np.array([7, 2**63 + 5, 0, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 1, 2**33, 17])
    together = uniform(seeds, positions)
    order = np.array([2, 0, 3, 1])
    assert uniform(seeds[order], positions[order]).tolist() == together[order].tolist()
    assert [uniform(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)] == together.tolist()


def test_all_64_bits_of_the_seed_and_the_whole_position_and_stream_count() -> None:
    seeds = np.array([1 << bit for bit in range(64)], dtype=np.uint64)
    assert len(set(uniform(seeds, np.zeros(64, dtype=np.int64)).tolist())) == 64
    positions = np.array([1 << bit for bit in range(62)])
    assert len(set(uniform(np.full(62, 3, dtype=np.uint64), positions).tolist())) == 62
    assert uniform(seeds[:1], positions[:1], stream=1)[0] != uniform(seeds[:1], positions[:1])[0]


def test_numbers_are_in_the_unit_interval_and_evenly_spread_over_positions_and_over_seeds() -> None:
    n = 200_000
    by_position = uniform(np.full(n, 42, dtype=np.uint64), np.arange(n))
    by_seed = uniform(np.arange(n, dtype=np.uint64), np.full(n, 9))
    for numbers in (by_position, by_seed):
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        counts = np.bincount((numbers * 256).astype(int), minlength=256)
        chi_square = ((counts - n / 256) ** 2 / (n / 256)).sum()
        assert 170 < chi_square < 350  # 255 degrees of freedom: 170 and 350 are beyond p = 1e-4
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.01


def test_the_native_numbers_are_the_same() -> None:
    runtime, generator = NativeRuntime(), np.random.default_rng(0)
    seeds, positions = generator.integers(0, 2**64, (2, 500), dtype=np.uint64)
    seeds[:64] = np.uint64(1) << np.arange(64, dtype=np.uint64)
    for stream in (0, 7, 2**32 - 1):
        found = native.uniforms(runtime, seeds, positions, stream)
        assert found.tobytes() == uniform(seeds, positions, stream).tobytes()
