"""What the model is trained on, and in which order: the one place where shares of tasks are written down.

`PHASES` is the schedule of `leaf`, from the first token to the last; `HEADS` the mixture of its speculation heads.
Read by prepare.py, the tokenizer and training/heads. Constants only: together with the seeds they decide every batch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A stretch of the training with one mixture.

    Attributes:
        name: For logs.
        share: Of the tokens of the first cycle, whose phases have 1 together.
        weights: Task -> weight among the samples (not the tokens) of this phase; see `registry.TASKS`.
    """

    name: str
    share: float
    weights: dict[str, float]


# Finding a word of the prompt and writing it again comes first: stories, extraction and tool calls wait for it. Lists
# are short to begin with, and numbers and words are compared before they are sorted.
_COPYING = {
    "copying": 14.0,
    "recital": 16.0,
    "sums": 8.0,
    "differences": 2.5,
    "small_arithmetic": 2.0,
    "story_questions": 16.0,
    "extraction": 16.0,
    "tool_calls": 8.0,
    "comparing": 6.0,
    "short_sorting": 6.0,
    "short_counting": 4.0,
    "convert": 3.0,
    "chat": 3.0,
    "refusals": 1.0,
    "tales": 1.5,
}
_TASKS = {
    "copying": 12.0,
    "recital": 8.0,
    "sums": 8.0,
    "word_sums": 1.5,
    "differences": 3.0,
    "small_arithmetic": 2.0,
    "story_questions": 26.0,
    "long_story_questions": 0.6,
    "extraction": 24.0,
    "tool_calls": 14.0,
    "tool_answers": 2.0,
    "two_tool_calls": 0.8,
    "no_tool": 0.7,
    "thinking": 3.0,
    "comparing": 3.0,
    "short_sorting": 3.0,
    "sorting": 20.0,
    "short_counting": 1.0,
    "counting": 4.5,
    "convert": 3.5,
    "chat": 3.0,
    "refusals": 1.5,
    "tales": 2.0,
    "mixed": 10.0,
}
# Conversations that change their subject: without them the form of one answer is taken for the form of the next.
_CONVERSATIONS = {
    **_TASKS,
    "comparing": 1.0,
    "short_sorting": 0.5,
    "short_counting": 0.5,
    "thinking": 4.0,
    "mixed": 38.0,
}

# Finding what stands before a word (who has the ball?) does not come by itself from the few such questions among the
# others: it needs dense practice, at the largest step size. Then all tasks again.
_OWNERS = {**_CONVERSATIONS, "owners": 900.0}
_ALL = {**_CONVERSATIONS, "copying": 20.0, "owners": 20.0}

FIRST_CYCLE = (
    Phase("copying", 0.25, _COPYING),
    Phase("tasks", 0.45, _TASKS),
    Phase("conversations", 0.30, _CONVERSATIONS),
)
PHASES = (*FIRST_CYCLE, Phase("owners", 0.05, _OWNERS), Phase("all", 0.12, _ALL))
CYCLES = 0, len(FIRST_CYCLE)
"""Phases with which the step size rises to its peak, rising; at the end of each cycle it has fallen to nothing."""
CYCLE_SHARES = 0.3, 0.7
"""Of the weights at the end of each cycle in those of the model: what each of them does best is mostly kept."""

# Longer answers weigh more here: it is in them that drafts save steps.
HEADS = Phase(
    "heads",
    1.0,
    {
        "copying": 5.0,
        "recital": 5.0,
        "sums": 5.0,
        "word_sums": 2.0,
        "differences": 3.0,
        "small_arithmetic": 1.0,
        "story_questions": 16.0,
        "extraction": 16.0,
        "tool_calls": 10.0,
        "tool_answers": 3.0,
        "two_tool_calls": 1.5,
        "thinking": 6.0,
        "counting": 2.0,
        "sorting": 2.0,
        "convert": 3.0,
        "chat": 8.0,
        "refusals": 3.0,
        "tales": 24.0,
        "mixed": 14.0,
    },
)


def overall(phases: tuple[Phase, ...]) -> dict[str, float]:
    """The weights of a whole schedule, as one mixture: each phase's, made to sum to 1, times its part of all."""
    total: dict[str, float] = {}
    all_shares = sum(phase.share for phase in phases)
    for phase in phases:
        whole = all_shares * sum(phase.weights.values())
        for task, weight in phase.weights.items():
            total[task] = total.get(task, 0.0) + phase.share * weight / whole
    return total
