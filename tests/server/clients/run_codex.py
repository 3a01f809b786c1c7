"""Codex against a server with a scripted model: tasks of several kinds, and windows that are too small.

`make test-codex`. The last line is pass or fail.
"""

from __future__ import annotations

import json
import re
import sys

from tests.server.clients.command_lines import DONE, KEY, Case, Start, call, documented, npm_program, run_all

MAKE = "printf 'made here' > made.txt && echo it-is-made"
AGENT_ID = re.compile(r'agent_id\W+"?([0-9a-f-]{36})')
TOO_LONG = "Codex ran out of room in the model's context window"


def one_call(prompt: str) -> str:
    """Makes the file, and looks at what the shell said."""
    return DONE if "Output:\nit-is-made" in prompt else call("exec_command", cmd=MAKE)


def script_of_calls(prompt: str) -> str:
    """Makes the file by a script, the input of a custom tool: what Codex offers to OpenAI's newest models."""
    if "<tool_response>" in prompt and "it-is-made" in prompt.rpartition("<tool_response>")[2]:
        return DONE
    code = f"const made = await tools.exec_command({json.dumps({'cmd': MAKE})}); text(made);"
    return call("functions__exec", input=code)


def second_agent(prompt: str) -> str:
    """Has the file made by an agent of its own, through the tools of a namespace."""
    if "Make made.txt" not in prompt:
        return "The agent is done." if "it-is-made" in prompt else call("exec_command", cmd=MAKE)
    if "The agent is done." in prompt:
        return DONE
    found = AGENT_ID.findall(prompt)
    if not found:
        return call("multi_agent_v1__spawn_agent", message="MAKE IT")
    return call("multi_agent_v1__wait_agent", targets=[found[-1]])


def long_output(prompt: str) -> str:
    """Fills the window by one output, and goes on after a summary of what was."""
    if "SUMMARY" in prompt:
        return DONE
    if "CONTEXT CHECKPOINT COMPACTION" in prompt:
        return "SUMMARY: made.txt is made."
    return "Not compacted." if "<tool_response>" in prompt else call("exec_command", cmd=f"{MAKE}; seq 1 20000")


CASES = [
    Case("a file is made by a call", one_call, 100_000, [DONE], statuses={200: 2}),
    Case(
        "tools among the items, one of free text", script_of_calls, 100_000, [DONE], statuses={200: 2},
        model="gpt-6-luna",
    ),
    Case("a second agent makes it", second_agent, 100_000, [DONE, "SpawnAgent"]),
    Case(
        "a prompt that is too long is known as one", one_call, 4000, [TOO_LONG], 1, is_made=False, statuses={400: 1},
        window=100_000,
    ),
    Case("a window that gets full is compacted", long_output, 20_000, [DONE, "context compacted"], statuses={200: 3}),
]  # fmt: skip


def start(case: Case, url: str) -> Start:
    """One task without questions, with the configuration of the page."""
    return Start(
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Make made.txt"],
        {"QUIRE_API_KEY": KEY}, {".codex/config.toml": documented("toml", case, url)},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run_all(CASES, npm_program("@openai/codex", "codex"), start))
