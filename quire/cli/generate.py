"""Answer prompts from the command line, a file or stdin.

    quire generate "Tell me a short story about a fox"
    quire generate --raw "Once upon a time" --temperature 0
    quire generate --prompts-file prompts.txt --json

Each prompt is a user's message for the model's chat template; with --raw, or where the model has no template, it is
text to be completed. Every prompt goes into one batch; the answers come in the order of the prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from quire.cli.sampling import add_model_arguments, add_sampling_arguments, sampling_from_args, start_engine
from quire.core.outputs import RequestOutput
from quire.entrypoints.llm import LLM
from quire.errors import ValidationError

DEFAULT_MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    group = parser.add_argument_group("prompts", "Without any, one prompt is read from stdin.")
    group.add_argument("prompts", nargs="*", metavar="PROMPT", help="A prompt.")
    group.add_argument("--prompt", "-p", action="append", default=[], metavar="TEXT", help="A prompt; repeatable.")
    group.add_argument("--prompts-file", metavar="FILE", help="A file with one prompt on each line.")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="Complete the text of each prompt; use no chat template.")
    form.add_argument("--chat", action="store_true", help="Fail if the model has no chat template.")
    group.add_argument("--n", type=int, default=1, metavar="INT", help="Completions per prompt.")
    group.add_argument("--json", action="store_true", help="Print one JSON object for each prompt.")
    add_sampling_arguments(parser)
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the completion of every prompt."""
    prompts = read_prompts(args)
    llm = LLM.from_engine(start_engine(args))
    with llm:
        params = sampling_from_args(args, llm.llm_engine, max_tokens=DEFAULT_MAX_TOKENS, n=args.n)
        if args.chat or (not args.raw and llm.llm_engine.chat_template is not None):
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
        else:
            outputs = llm.generate(prompts, params)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        print(
            json.dumps(as_record(index, prompt, output), ensure_ascii=False)
            if args.json
            else as_text(output, len(outputs))
        )
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line and the file, else the whole of stdin."""
    prompts = [*args.prompts, *args.prompt]
    if args.prompts_file is not None:
        try:
            lines = Path(args.prompts_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValidationError(
                f"cannot read prompts from {args.prompts_file}: {error}",
                hint="use a UTF-8 text file with one prompt on each line",
                field="prompts-file",
            ) from error
        prompts += [line for line in lines if line.strip()]
    if not prompts and args.prompts_file is None:
        prompts = [sys.stdin.read().rstrip("\n")]
    if not any(prompts):
        raise ValidationError("no prompt given", hint="pass one on the command line, in a file, or on stdin")
    return prompts


def as_record(index: int, prompt: str, output: RequestOutput) -> dict[str, Any]:
    """One output as plain data."""
    return {
        "index": index,
        "prompt": prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "outputs": [
            {
                "text": one.text,
                "token_ids": one.token_ids,
                "finish_reason": one.finish_reason,
                "stop_reason": one.stop_reason,
            }
            for one in output.outputs
        ],
    }


def as_text(output: RequestOutput, num_outputs: int) -> str:
    """The answers as people read them; a number in front when there are several."""
    several = num_outputs > 1 or len(output.outputs) > 1
    names = [
        f"[{output.request_id}.{one.index}] " if len(output.outputs) > 1 else f"[{output.request_id}] "
        for one in output.outputs
    ]
    return "\n".join((name if several else "") + one.text for name, one in zip(names, output.outputs, strict=True))
