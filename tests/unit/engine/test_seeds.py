"""Keys of random numbers: fixed by the request's seed, else by the engine's seed and the handle."""

from __future__ import annotations

from quire.engine.seeds import mix64, request_key


def test_a_seeded_key_depends_on_the_seed_alone():
    assert request_key(7, 0, 1) == request_key(7, 99, 2)
    assert request_key(7, 0, 1) != request_key(8, 0, 1)
    assert 0 <= request_key(-(2**63), 0, 0) < 2**64


def test_unseeded_keys_differ_by_handle_and_engine_seed():
    keys = {request_key(None, seed, handle) for seed in range(50) for handle in range(50)}
    assert len(keys) == 2500
    assert request_key(None, 3, 4) == request_key(None, 3, 4)


def test_the_mixer_gives_the_published_sequence():
    """First outputs of SplitMix64 from state 0, which advances by the golden gamma."""
    assert mix64(0) == 0xE220A8397B1DCDAF
    assert mix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
