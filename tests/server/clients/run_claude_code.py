"""Claude Code against a server with a scripted model: a task, a prompt that is too long, and a window that gets full.

`make test-claude-code`. The last line is pass or fail.
"""

from __future__ import annotations

import re
import sys

from tests.server.clients.command_lines import DONE, Case, Start, call, documented, npm_program, run_all

# Without it, --dangerously-skip-permissions is refused to root.
SANDBOX = {"IS_SANDBOX": "1"}
EXPORTED = re.compile(r"(\w+)=(\S+)")
MAKE = "printf 'made here' > made.txt"
MAX_ROUNDS = 15


def write_and_read(prompt: str) -> str:
    """Makes the file by one tool, and looks at it by another."""
    if "1\tmade here" in prompt:
        return DONE
    if "File created successfully at: " in prompt:
        path = prompt.split("File created successfully at: ")[1].split()[0]
        return call("Read", file_path=path)
    folder = prompt.split("Primary working directory: ")[1].splitlines()[0]
    return call("Write", file_path=f"{folder}/made.txt", content="made here")


def rounds(prompt: str) -> str:
    """Fills the window little by little, and goes on after a summary of what was."""
    if "made.txt was made" in prompt:
        return DONE
    if "create a detailed summary" in prompt:
        return "<summary>made.txt was made.</summary>"
    if prompt.count("<tool_response>") == MAX_ROUNDS:
        return "Not compacted."
    return call("Bash", command=f"{MAKE}; seq 1 1500", description="Make the file")


COMPACTED = [f'"result":"{DONE}"', '"compact_result":"success"']
CASES = [
    Case(
        "a file is made and read by calls", write_and_read, 100_000, [f'"result":"{DONE}"', '"is_error":false'],
        statuses={200: 3},
    ),
    Case(
        "a prompt that is too long is known as one", write_and_read, 4000, ["Prompt is too long", '"is_error":true'], 1,
        is_made=False, statuses={400: 1},
    ),
    Case("a window is compacted before it is full", rounds, 100_000, COMPACTED),
    Case("a window that is full is compacted when that is told", rounds, 60_000, COMPACTED, statuses={200: 0, 400: 0}),
]  # fmt: skip


def start(case: Case, url: str) -> Start:
    """One task without questions, told event by event."""
    return Start(
        ["-p", "Make made.txt", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"],
        {**SANDBOX, **dict(EXPORTED.findall(documented("sh", case, url)))},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_all(CASES, npm_program("@anthropic-ai/claude-code", "claude"), start))
