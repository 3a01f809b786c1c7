"""StepPerf: what a step computed and moved, against what its device does at most. Values only."""

from __future__ import annotations

from dataclasses import dataclass

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
STEP_KINDS = (PREFILL, DECODE, MIXED)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The weights that a rank has loaded, as they are stored, scales included.

    Attributes:
        layer_bytes: of all projections, experts and heads of its layers.
        head_bytes: of the output projection.
        num_weights: of these layers, as numbers.
    """

    layer_bytes: int
    head_bytes: int
    num_weights: int


@dataclass(frozen=True, slots=True)
class StepPerf:
    """One step, as it counts for each of the ranks that computed it.

    Attributes:
        kind: "prefill" where all tokens are of prompts, "decode" where none is, else "mixed".
        seconds: of its execution.
        flops: operations, from the shape of the model.
        read_bytes, write_bytes: of weights as they are stored, keys and values, and recurrent states.
        flops_limit, bytes_limit: a second, as they were measured; 0 = they were not.
    """

    kind: str
    seconds: float
    flops: float
    read_bytes: float
    write_bytes: float
    flops_limit: float = 0.0
    bytes_limit: float = 0.0
