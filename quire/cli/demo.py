"""Eight different prompts answered at once by the embedded model, as the tokens come; then speed and TTFT.

In a terminal all eight answers grow side by side; without one, each is printed when it is complete.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from quire.cli.sampling import add_model_arguments, start_engine
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.interrupts import DeferredInterrupt
from quire.errors import ChatTemplateError

PROMPTS = (
    "What is 27 + 58?",
    "Mia bought 14 apples on Monday and 23 on Tuesday. How many did she buy?",
    "Read the story and answer.\n\nAt noon, Oscar had soup. Oscar lost a ball at the park.\n\nWhat did Oscar lose?",
    "Extract customer, quantity and day as JSON: Please send 15 yellow baskets to Iris on Tuesday.",
    "What is 9 weeks in days?",
    "Write 18:45 as 12-hour time.",
    "Tell me a story about a horse named Anna.",
    "Who are you?",
)
REFRESHES_PER_S = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    group = parser.add_argument_group("demo")
    group.add_argument(
        "--max-tokens", type=int, default=160, metavar="INT", help="Maximum output tokens of each request."
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer the prompts and print the figures."""
    started = time.perf_counter()
    engine = start_engine(args)
    try:
        print(
            f"model {engine.config.model.served_model_name} ready in {time.perf_counter() - started:.1f} s", flush=True
        )
        answers = ask_all(engine, args.max_tokens, Display(is_terminal=sys.stdout.isatty()))
        print(summary(answers, engine), flush=True)
        return 0
    finally:
        engine.shutdown()


class Answers:
    """The eight answers as they grow.

    Attributes:
        texts: by prompt.
        finished: final outputs by prompt; None while it runs.
        seconds: from the first prompt's arrival to the last token.
    """

    def __init__(self, count: int) -> None:
        self.texts = [""] * count
        self.finished: list[RequestOutput | None] = [None] * count
        self.seconds = 0.0


class Display:
    """Shows answers: a live table in a terminal, plain lines elsewhere."""

    def __init__(self, *, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self._live: Any = None

    def open(self) -> AbstractContextManager[Any]:
        """Begin; the context ends the display."""
        if not self._is_terminal:
            return nullcontext()
        from rich.live import Live  # late: only a terminal needs it

        self._live = Live(refresh_per_second=REFRESHES_PER_S)
        return self._live  # type: ignore[no-any-return]

    def update(self, answers: Answers, just_finished: list[int]) -> None:
        """Show what has changed."""
        if self._live is not None:
            self._live.update(_table(answers))
            return
        for index in just_finished:
            print(f"\n> {PROMPTS[index]}\n{answers.texts[index].strip()}", flush=True)


def ask_all(engine: LLMEngine, max_tokens: int, display: Display) -> Answers:
    """Submit every prompt, and step until all are answered."""
    if engine.chat_template is None:
        raise ChatTemplateError("the demo needs a model with a chat template", hint="leave out --model")
    answers = Answers(len(PROMPTS))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
    start = time.perf_counter()
    for index, prompt in enumerate(PROMPTS):
        text = engine.chat_template.render([{"role": "user", "content": prompt}])
        engine.add_request(str(index), text, params, add_special_tokens=False)
    with display.open(), DeferredInterrupt() as interrupt:
        while engine.has_unfinished_requests():
            interrupt.raise_if_pending()
            display.update(answers, _take(answers, engine.step()))
    answers.seconds = time.perf_counter() - start
    return answers


def summary(answers: Answers, engine: LLMEngine) -> str:
    """The figures of the run."""
    done = [output for output in answers.finished if output is not None]
    num_tokens = sum(output.metrics.num_generation_tokens for output in done)
    ttft_ms = [output.metrics.first_token_latency * 1e3 for output in done]
    config = engine.config
    return (
        f"\n{len(done)} prompts at once: {num_tokens} tokens in {answers.seconds:.2f} s = "
        f"{num_tokens / answers.seconds:.0f} tokens/s, TTFT median {statistics.median(ttft_ms):.0f} ms "
        f"({config.device.device}, {config.device.num_threads} threads, {config.model.dtype})"
    )


def _take(answers: Answers, outputs: list[RequestOutput]) -> list[int]:
    """Take in one step's outputs; returns the prompts that are answered now."""
    just_finished = []
    for output in outputs:
        index = int(output.request_id)
        answers.texts[index] += output.outputs[0].text
        if output.finished:
            answers.finished[index] = output
            just_finished.append(index)
    return just_finished


def _table(answers: Answers) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("answer", ratio=3)
    for prompt, text, output in zip(PROMPTS, answers.texts, answers.finished, strict=True):
        style = "" if output is not None else "dim"
        table.add_row(Text(prompt.replace("\n\n", "\n")), Text(text.strip() or "...", style=style))
    return table


def main(argv: list[str] | None = None, parser_class: Callable[..., Any] = argparse.ArgumentParser) -> int:
    """Run the demo as a module: `python -m quire.cli.demo`."""
    parser = parser_class(prog="quire demo", description="Run eight prompts at once.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


if __name__ == "__main__":
    raise SystemExit(main())
