"""Text of the model card. Called by export.py; no state."""

from __future__ import annotations

from typing import Any

from training.corpus.registry import MEASURED
from training.model import LeafConfig

_INTRO = """\
---
license: apache-2.0
language: en
library_name: quire
pipeline_tag: text-generation
---

# leaf

`leaf` is the tiny chat model that ships inside Quire, so that the engine can be tried and tested without any
download. It has {parameters:,} parameters in bfloat16 ({layers} layers, hidden size {hidden}, {heads} query and
{kv} key/value heads of size {dim}, vocabulary {vocab}, tied embeddings) in the shape of `Qwen3ForCausalLM`.

## What it can do

Only the kinds of text that its generator writes, in plain English:

- add two-digit numbers; subtract; small products; count, compare and sort short lists; convert units, dates and times;
- answer questions about short stories given in the prompt;
- extract named fields from a sentence or note as one line of JSON;
- call tools in Hermes form (`<tool_call>` with JSON) and turn a `<tool_response>` into a sentence;
- think in a short `<think>...</think>` block when the system message ends with the word `/think`;
- small talk about itself, greetings, thanks, and little made-up tales.

## What it cannot do

It knows nothing about the world and says so ("I don't know that; I am a very small model"), mostly. Requests unlike
its training text get wrong or empty-headed answers. It has seen conversations of up to about 1,000 tokens. Names and
words outside its word lists are often copied with mistakes. Do not use it for anything that matters.

## How it was made

From nothing, by the scripts in `training/` of the Quire repository: a seeded procedural text generator, a byte-level
BPE tokenizer with single digits, and a PyTorch trainer with Muon for the hidden matrices and AdamW for the rest.
No text, weights or data came from anywhere else. This copy was trained for {minutes:.0f} minutes on {tokens:.1f}
million tokens ({steps} steps); its weights are the mean of those at the ends of the two cycles of step sizes. `make
leaf` makes it again, with the schedule of tasks in `training/mixture.py`.

Seed {seed}; SHA-256 of model.safetensors: `{digest}`.
"""

_SCORES = """
## Scores

Greedy answers to {count} held-out prompts a task. Held-out means that training never saw the pair of numbers (in
either order) or the combination of slot values; the split is a hash of that key. Right means: sums, the last number
is exact; stories, the wanted words are there and no competing value of the story; JSON, equal after parsing; tool
calls, exactly the wanted call with exactly the wanted arguments and no other text.

| task | right | ended its turn |
| --- | --- | --- |
{rows}

Tasks in bold are the ones the model is made for. Repeat with:

<!-- shown: takes minutes -->
```sh
python -m training.evaluate --model quire/assets/leaf
```
"""


def model_card(
    config: LeafConfig,
    parameters: int,
    state: dict[str, Any],
    scores: dict[str, Any] | None,
    digest: str,
    note: str = "",
) -> str:
    """Writes the card.

    Args:
        config: Sizes of the network.
        parameters: Number of weights.
        state: Trainer checkpoint (elapsed seconds, tokens, step, seed).
        scores: Summary of evaluate.py, or None if there is none yet.
        digest: SHA-256 of the weights' file, in hexadecimal.
        note: A sentence about this run in particular.
    """
    text = _INTRO.format(
        parameters=parameters,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv=config.num_key_value_heads,
        dim=config.head_dim,
        vocab=config.vocab_size,
        minutes=state["elapsed"] / 60,
        tokens=state["tokens"] / 1e6,
        steps=state["step"],
        seed=state["seed"],
        digest=digest,
    )
    text += f"\n{note}\n" if note else ""
    if scores is None:
        return text + "\n## Scores\n\nNot measured yet: this is an unfinished version.\n"
    rows = []
    for task, s in scores["scores"].items():
        name = task.replace("_", " ")
        name = f"**{name}**" if task in MEASURED else name
        rows.append(f"| {name} | {s['accuracy']:.1%} | {s['ended']:.1%} |")
    return text + _SCORES.format(count=scores["count"], rows="\n".join(rows))
