"""From logits that masks and penalties have changed to tokens: by torch on any device, or by native kernels."""

from __future__ import annotations

from quire.sample.choosers.interface import Chooser
from quire.sample.choosers.native import NativeChooser
from quire.sample.choosers.torch_ops import TorchChooser
from quire.sample.states import SamplingStates


def make_chooser(states: SamplingStates) -> Chooser:
    """The chooser for rows of `states`: native where they have a runtime."""
    return TorchChooser(states) if states.runtime is None else NativeChooser(states, states.runtime)


__all__ = ["Chooser", "NativeChooser", "TorchChooser", "make_chooser"]
