"""Tensors on huge pages, and checksums."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.errors import NotEnoughMemoryError, ShapeError
from quire.kernels.native.memory import HUGE_PAGE_BYTES, checksum, huge_zeros
from quire.kernels.native.runtime import NativeRuntime

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5, 7), (1024, 1025), (2 * MIB,)], ids=str)
def test_memory_is_zeroed_aligned_and_writable_to_its_end(shape: tuple[int, ...], dtype: torch.dtype):
    tensor = huge_zeros(shape, dtype)
    assert tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    assert tensor.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not tensor.any()
    tensor.fill_(1)
    assert tensor.view(-1)[-1] == 1


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 1 << 60)], ids=str)
def test_an_empty_tensor_needs_no_memory(shape: tuple[int, ...]):
    assert huge_zeros(shape, torch.float32).shape == shape


def test_a_scalar_is_a_tensor_too():
    assert huge_zeros((), torch.float32).shape == ()


def test_memory_goes_back_to_the_system_with_the_last_view():
    size = 64 * MIB
    gc.collect()  # what other tests left goes back now, and not in between
    before = resident_bytes()
    tensor = huge_zeros((size,), torch.uint8).fill_(1)
    assert resident_bytes() - before > size * 9 // 10
    view = tensor[size // 2 :].view(torch.int32)
    del tensor
    gc.collect()
    assert resident_bytes() - before > size * 9 // 10 and view[0] == 0x01010101
    del view
    gc.collect()
    assert resident_bytes() - before < size // 10


def test_many_tensors_leave_no_memory_and_no_mapping_behind():
    num_maps = len(Path("/proc/self/maps").read_text().splitlines())
    before = resident_bytes()
    for _ in range(50):
        huge_zeros((4 * MIB,), torch.uint8).fill_(1)
    assert resident_bytes() - before < 16 * MIB
    assert len(Path("/proc/self/maps").read_text().splitlines()) < num_maps + 20


@pytest.mark.parametrize("shape", [(1 << 44,), (1 << 60,), (1 << 40, 1 << 40)], ids=str)
def test_more_memory_than_there_is_is_refused_with_the_numbers(shape: tuple[int, ...]):
    with pytest.raises(NotEnoughMemoryError, match=r"GiB of memory for a tensor of shape .* free \(limited by"):
        huge_zeros(shape, torch.float32)


def test_a_negative_size_is_refused():
    with pytest.raises(ShapeError, match="negative"):
        huge_zeros((4, -1), torch.float32)


def test_a_tensor_that_lives_until_the_interpreter_ends_does_no_harm():
    code = (
        "import threading, torch\n"
        "from quire.kernels.native.memory import huge_zeros\n"
        "held = huge_zeros((1 << 20,), torch.float32).fill_(1)\n"
        "cycle = [held]; cycle.append(cycle); torch.held = held\n"
        "threading.Thread(target=threading.Event().wait, args=(), daemon=True).start()\n"
        "class AtExit:\n"
        "    def __del__(self): assert held.sum() == 1 << 20\n"
        "late = AtExit()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, MIB - 1, MIB, MIB + 1, 3 * MIB + 5])
def test_a_checksum_is_the_same_from_any_number_of_threads(size: int):
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    runtimes = [NativeRuntime("portable", num_threads=n) for n in (1, 2, 3)]
    assert len({checksum(runtime, data) for runtime in runtimes}) == 1
    assert checksum(runtimes[0], data.clone()) == checksum(runtimes[0], data)


def test_every_flipped_bit_changes_the_checksum(portable: NativeRuntime):
    data = torch.randint(0, 256, (300,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    sums = {checksum(portable, data)}
    for byte in range(300):
        for bit in range(8):
            data[byte] ^= 1 << bit
            sums.add(checksum(portable, data))
            data[byte] ^= 1 << bit
    assert len(sums) == 300 * 8 + 1


def test_two_flips_of_the_highest_bits_in_one_lane_do_not_cancel(portable: NativeRuntime):
    data = torch.zeros(1024, dtype=torch.uint8)
    clean = checksum(portable, data)
    for word in range(1, 15):
        flipped = data.clone()
        flipped[7] ^= 128
        flipped[64 * word + 7] ^= 128
        assert checksum(portable, flipped) != clean


def test_swapped_blocks_and_other_lengths_of_zeros_differ(portable: NativeRuntime):
    assert len({checksum(portable, torch.zeros(n, dtype=torch.uint8)) for n in range(200)}) == 200
    blocks = torch.arange(4, dtype=torch.int64).repeat_interleave(MIB // 8)
    swapped = blocks.view(4, -1)[[1, 0, 2, 3]].reshape(-1)
    assert checksum(portable, blocks) != checksum(portable, swapped)


@pytest.mark.parametrize("tensor", [torch.zeros(4, 4).T[1:], torch.empty(4, device="meta")], ids=["strided", "meta"])
def test_memory_that_cannot_be_read_in_one_go_is_refused(portable: NativeRuntime, tensor: torch.Tensor):
    with pytest.raises(ShapeError):
        checksum(portable, tensor)
