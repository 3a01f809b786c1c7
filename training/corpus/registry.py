"""All tasks by name, and streams of training and held-out samples.

Called by prepare.py (training text), tokenizer.py, evaluate.py and training/heads. How much of each task there is
stands in training/mixture.py. The only randomness is the seed that the caller passes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from training.corpus import arithmetic, chat, convert, copying, extract, lists, mixed, stories, tales, think, tools
from training.corpus.base import Sample, held_out

Maker = Callable[[random.Random, bool], Sample]

# What a conversation that changes its subject is made of.
MIXED: tuple[Maker, ...] = (
    arithmetic.make_sums,
    arithmetic.make_word_sums,
    arithmetic.make_differences,
    arithmetic.make_small,
    stories.make_story_question,
    extract.make_extraction,
    lists.make_counting,
    lists.make_sorting,
    lists.make_sorting,
    convert.make_convert,
    chat.make_chat,
    chat.make_chat,
    chat.make_refusal,
    tales.make_tale,
    copying.make_copying,
)


def _make_mixed(rng: random.Random, single: bool) -> Sample:
    return mixed.make_mixed(rng, MIXED)


TASKS: dict[str, Maker] = {
    "copying": copying.make_copying,
    "recital": copying.make_recital,
    "owners": copying.make_owners,
    "sums": arithmetic.make_sums,
    "word_sums": arithmetic.make_word_sums,
    "differences": arithmetic.make_differences,
    "small_arithmetic": arithmetic.make_small,
    "story_questions": stories.make_story_question,
    "long_story_questions": stories.make_long_story_question,
    "extraction": extract.make_extraction,
    "tool_calls": tools.make_tool_call,
    "tool_answers": tools.make_tool_answer,
    "two_tool_calls": tools.make_two_calls,
    "no_tool": tools.make_no_tool,
    "thinking": think.make_think,
    "comparing": lists.make_comparing,
    "short_counting": lists.make_short_counting,
    "counting": lists.make_counting,
    "short_sorting": lists.make_short_sorting,
    "sorting": lists.make_sorting,
    "convert": convert.make_convert,
    "chat": chat.make_chat,
    "refusals": chat.make_refusal,
    "tales": tales.make_tale,
    "mixed": _make_mixed,
}
MEASURED = ("sums", "story_questions", "extraction", "tool_calls")
EVALUATED = MEASURED + (
    "differences",
    "word_sums",
    "thinking",
    "copying",
    "tool_answers",
    "two_tool_calls",
    "counting",
    "sorting",
    "comparing",
    "convert",
    "refusals",
    "tales",
)


def training_samples(seed: int, weights: dict[str, float]) -> Iterator[Sample]:
    """Yields training samples for ever; none of their keys is held out.

    Args:
        seed: Decides about every sample, with the weights.
        weights: Task -> weight among the samples.
    """
    rng = random.Random(f"train {seed}")
    makers = [TASKS[task] for task in weights]
    shares = list(weights.values())
    while True:
        maker = rng.choices(makers, shares)[0]
        sample = maker(rng, False)
        while any(held_out(k) for k in sample.keys):
            sample = maker(rng, False)
        yield sample


def held_out_samples(task: str, count: int, seed: int = 0) -> list[Sample]:
    """Returns `count` single-question samples whose every key is held out."""
    rng = random.Random(f"held out {task} {seed}")
    maker = TASKS[task]
    found: list[Sample] = []
    while len(found) < count:
        sample = maker(rng, True)
        if sample.check and sample.keys and all(held_out(k) for k in sample.keys):
            found.append(sample)
    return found
