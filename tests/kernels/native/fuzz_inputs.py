"""Sizes and tensors that the fuzzer's calls are made of."""

from __future__ import annotations

import random

import torch

from tests.kernels.native.guards import randn

FLOATS = (torch.bfloat16, torch.float32)


def number(rng: random.Random) -> int:
    return rng.choice((1, 2, 3, 5, 15, 16, 17, 31, 33, 40))


def normal(rng: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return randn(*shape, dtype=dtype, seed=rng.randrange(1000))
