"""Greedy batched generation with the plain-torch model, for the evaluation.

Called by evaluate.py; the engine has its own, faster path. No state.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from training.model import KVCache, Leaf
from training.tokenizer import END_OF_TEXT, IM_END


@torch.inference_mode()
def generate_ids(model: Leaf, prompts: list[list[int]], max_tokens: int) -> list[tuple[list[int], bool]]:
    """Continues a batch of prompts greedily.

    Args:
        model: The network, in float32.
        prompts: Token ids of each prompt; padded at the left here.
        max_tokens: Longest answer, in tokens.

    Returns:
        For each prompt the new ids (without the end token) and whether it ended its turn.
    """
    longest = max(map(len, prompts))
    device = model.model.embed_tokens.weight.device
    pad = torch.tensor([longest - len(p) for p in prompts], device=device)
    ids = torch.tensor([[END_OF_TEXT] * (longest - len(p)) + p for p in prompts], device=device)
    positions = (torch.arange(longest, device=device)[None] - pad[:, None]).clamp(min=0)
    cache = KVCache(model.config, pad, longest + max_tokens)
    new: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for _ in range(max_tokens):
        logits = model.logits(model.hidden(ids, positions, cache)[:, -1])
        chosen = logits.argmax(-1)
        for i, token in enumerate(chosen.tolist()):
            if not ended[i]:
                if token in (IM_END, END_OF_TEXT):
                    ended[i] = True
                else:
                    new[i].append(token)
        if all(ended):
            break
        ids, positions = chosen[:, None], positions[:, -1:] + 1
    return list(zip(new, ended))


def generate_texts(
    model: Leaf, tokenizer: Tokenizer, prompts: list[str], max_tokens: int, batch: int = 50
) -> list[tuple[str, bool]]:
    """Answers rendered prompts.

    Returns:
        For each prompt the text of the answer and whether the turn was ended.
    """
    encoded = [tokenizer.encode(p, add_special_tokens=False).ids for p in prompts]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    results: list[tuple[str, bool]] = [("", False)] * len(prompts)
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        for i, (ids, ended) in zip(rows, generate_ids(model, [encoded[i] for i in rows], max_tokens)):
            results[i] = (tokenizer.decode(ids, skip_special_tokens=False), ended)
    return results
