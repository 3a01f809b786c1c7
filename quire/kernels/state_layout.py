"""How the states of Mamba 1 lie in memory: sixteen channels side by side, as its kernel takes them.

Called by layers, which declare states and load weights of that layout, by the kernel's wrapper and its reference.
"""

from __future__ import annotations

import torch

LANES = 16
"""Channels that lie side by side."""


def mamba_state_shape(inner_size: int, state_size: int) -> tuple[int, int, int]:
    """Of one request's state: [blocks of channels, state_size, LANES]."""
    return -(-inner_size // LANES), state_size, LANES


def in_lanes(rows: torch.Tensor) -> torch.Tensor:
    """[inner_size, state_size] -> the shape of `mamba_state_shape`, copied; lanes past the last channel are zero."""
    shape = mamba_state_shape(*rows.shape)
    padded = rows.new_zeros(shape[0] * LANES, shape[1])
    padded[: len(rows)] = rows
    return padded.view(-1, LANES, shape[1]).transpose(1, 2).contiguous()


def from_lanes(lanes: torch.Tensor, inner_size: int) -> torch.Tensor:
    """Undoes `in_lanes`."""
    return lanes.transpose(1, 2).reshape(-1, lanes.shape[1])[:inner_size]
