"""Which tensors of a checkpoint other pipeline stages read: their layers', by number. Called by the decoder; pure."""

from __future__ import annotations

from quire.distributed.pipeline import PipelineStage

WORD = r"[^.]*[^.0-9][^.]*"  # a part of a name that is not a number


def tensors_elsewhere(stage: PipelineStage, num_layers: int) -> tuple[str, ...]:
    """Patterns of the names of such tensors, whatever the family calls its layers: the first number in a name is the
    layer's. Names without one are of the first stage, but for the final norm, which every stage has.
    """
    others = [str(number) for number in range(num_layers) if number not in stage.layers]
    of_layers = rf"^({WORD}\.)*({'|'.join(others)})\."
    return (of_layers,) if stage.is_first else (of_layers, rf"^({WORD}\.)*{WORD}$")
