"""The scores that a new `leaf` must reach: those of the first one, and what is asked of tasks in which that was weak.

Called by build.py after the evaluation. A score of few prompts wavers, so that it may be below the first card's by two
standard errors or 0.6%; the figures that are asked for have no such room.
"""

from __future__ import annotations

CARD = {
    "sums": 1.0,
    "story_questions": 0.974,
    "extraction": 0.998,
    "tool_calls": 0.980,
    "differences": 0.908,
    "word_sums": 0.996,
    "thinking": 0.856,
    "copying": 0.988,
    "tool_answers": 0.990,
    "two_tool_calls": 0.984,
    "convert": 0.962,
    "refusals": 1.0,
    "tales": 1.0,
}
ASKED = {"counting": 0.90, "sorting": 0.80, "comparing": 0.85}
ENDED = 0.99  # share of turns that must be ended, in every task


def shortfalls(count: int, scores: dict[str, dict[str, float]]) -> list[str]:
    """Which tasks are worse than they must be, as sentences; empty if none.

    Args:
        count: Prompts of each task.
        scores: Task -> {"accuracy", "ended"}, as evaluate.py returns them.
    """
    found = []
    for task, floor in {**CARD, **ASKED}.items():
        room = 0.0 if task in ASKED else max(0.006, 2 * (floor * (1 - floor) / count) ** 0.5)
        if task not in scores:
            found.append(f"{task} was not measured")
        elif scores[task]["accuracy"] < floor - room:
            found.append(f"{task}: {scores[task]['accuracy']:.1%} right, at least {floor - room:.1%} is asked")
    found += [f"{task}: {s['ended']:.1%} of turns ended" for task, s in scores.items() if s["ended"] < ENDED]
    return found
