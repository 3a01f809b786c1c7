"""Every attention layer's parameters, from one forward pass of the class without values, on torch's meta device.

Called by `model` before a weight is read. No state: the notes are on modules that are thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from quire.attention.backend import AttentionParams
from quire.models.transformers_backend.attention import NOTES, AttentionCall
from quire.models.transformers_backend.classes import FAILURES, TransformersClass, first_line, refusal
from quire.models.transformers_backend.even_rows import NoteUneven
from quire.models.transformers_backend.head import logits_of, take_decoder

NUM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Probe:
    """What a class was found to do.

    Attributes:
        layers: name of each attention module of its decoder -> parameters, in the order of the layers.
        is_uneven: it calls functions that need `EvenRows`.
    """

    layers: dict[str, AttentionParams]
    is_uneven: bool


def run_probe(found: TransformersClass, dtype: torch.dtype) -> Probe:
    """Run the class, in the type of its activations, on tokens without values.

    Raises:
        UnsupportedError: it asks for what Quire's attention does not compute, or has other layers.
    """
    uneven = NoteUneven()
    with torch.device("meta"), torch.no_grad(), uneven:
        model = found.build_noting(dtype)
        found.check_parts(model)
        base = take_decoder(model)
        ids = torch.zeros(1, NUM_TOKENS, dtype=torch.long)
        try:
            hidden = base(
                input_ids=ids, position_ids=torch.arange(NUM_TOKENS)[None], attention_mask=torch.ones_like(ids),
                use_cache=False, return_dict=True,
            ).last_hidden_state  # fmt: skip
            logits = logits_of(model, hidden[0])
        except FAILURES as error:
            problem = f"its code does not run on tokens without values ({first_line(error)})"
            raise refusal(found.architecture, problem) from error
    if hidden.shape[:2] != ids.shape or logits.shape[0] != NUM_TOKENS:
        raise refusal(found.architecture, "it does not give one vector and one row of logits for each token")
    layers = {name: _params(found, notes) for name, notes in _noted(base)}
    expected = found.num_layers
    if len(layers) != expected:
        raise refusal(
            found.architecture,
            f"{len(layers)} of its {expected} layers call the attention registry (recurrent layers?)",
        )
    return Probe(layers, uneven.found)


def _noted(base: nn.Module) -> list[tuple[str, list[AttentionCall]]]:
    return [(name, module.__dict__[NOTES]) for name, module in base.named_modules() if NOTES in module.__dict__]


def _params(found: TransformersClass, notes: list[AttentionCall]) -> AttentionParams:
    call = notes[0]
    problems = [*call.problems]
    if len(notes) != 1:
        problems.append(f"a layer calls its attention {len(notes)} times")
    if call.value_size > call.head_size:
        problems.append(f"its keys have {call.head_size} elements and its values {call.value_size}")
    if call.num_heads % call.num_kv_heads:
        problems.append(f"its {call.num_heads} query heads are not a multiple of its {call.num_kv_heads} key heads")
    if problems:
        raise refusal(found.architecture, "; ".join(problems))
    return AttentionParams(
        num_heads=call.num_heads, num_kv_heads=call.num_kv_heads, head_size=call.head_size, scale=call.scale,
        sliding_window=call.window, soft_cap=call.soft_cap,
    )  # fmt: skip
