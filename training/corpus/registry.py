"""The mixture of tasks, and streams of training and held-out samples.

Called by prepare.py (training text), tokenizer.py and evaluate.py. The only
randomness is the seed that the caller passes.
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
    convert.make_convert,
    chat.make_chat,
    chat.make_chat,
    chat.make_refusal,
    tales.make_tale,
    copying.make_copying,
)


def _make_mixed(rng: random.Random, single: bool) -> Sample:
    return mixed.make_mixed(rng, MIXED)


# maker -> share of training samples (not of tokens)
MIXTURE: dict[str, tuple[Maker, float]] = {
    "copying": (copying.make_copying, 12.0),
    "recital": (copying.make_recital, 8.0),
    "sums": (arithmetic.make_sums, 8.0),
    "word_sums": (arithmetic.make_word_sums, 1.5),
    "differences": (arithmetic.make_differences, 2.5),
    "small_arithmetic": (arithmetic.make_small, 2.0),
    "story_questions": (stories.make_story_question, 26.0),
    "long_story_questions": (stories.make_long_story_question, 0.6),
    "extraction": (extract.make_extraction, 24.0),
    "tool_calls": (tools.make_tool_call, 14.0),
    "tool_answers": (tools.make_tool_answer, 2.0),
    "two_tool_calls": (tools.make_two_calls, 0.8),
    "no_tool": (tools.make_no_tool, 0.7),
    "thinking": (think.make_think, 3.0),
    "counting": (lists.make_counting, 2.5),
    "sorting": (lists.make_sorting, 2.5),
    "convert": (convert.make_convert, 3.5),
    "chat": (chat.make_chat, 3.0),
    "refusals": (chat.make_refusal, 1.5),
    "tales": (tales.make_tale, 2.0),
    "mixed": (_make_mixed, 24.0),
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
    "convert",
    "refusals",
    "tales",
)


def training_samples(seed: int) -> Iterator[Sample]:
    """Yields training samples for ever; none of their keys is held out."""
    rng = random.Random(f"train {seed}")
    makers = [m for m, _ in MIXTURE.values()]
    weights = [w for _, w in MIXTURE.values()]
    while True:
        maker = rng.choices(makers, weights)[0]
        sample = maker(rng, False)
        while any(held_out(k) for k in sample.keys):
            sample = maker(rng, False)
        yield sample


def held_out_samples(task: str, count: int, seed: int = 0) -> list[Sample]:
    """Returns `count` single-question samples whose every key is held out."""
    rng = random.Random(f"held out {task} {seed}")
    maker = MIXTURE[task][0]
    found: list[Sample] = []
    while len(found) < count:
        sample = maker(rng, True)
        if sample.check and sample.keys and all(held_out(k) for k in sample.keys):
            found.append(sample)
    return found
