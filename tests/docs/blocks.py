"""The fenced blocks of all Markdown, and what is to be done with each.

A block is executed, unless a comment before it gives one of a few reasons why it is only shown. Readers of the page do
not see the comment:

    <!-- shown: needs Kubernetes -->            not executed; commands of quire are still parsed, data is still read
    <!-- shown: a response; run by FILE -->     executed by a test or `make TARGET`, which must exist
    <!-- file: models.yaml -->                  data that the commands of the page read
    <!-- check: quire serve --models FILE -->   data that this command reads
    <!-- with: MODEL=leaf; 200=20 -->           replaced in the block before it is executed
    <!-- before: COMMAND -->                    run before the block: what its readers have, and a test has not

Console blocks have commands after `$` and what they print; `...` stands for anything. A `text` block after Python is
what that prints.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from quire.cli.main import COMMANDS
from quire.entrypoints.args import QuireParser
from quire.errors import QuireError

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).parents[2]
NOT_OURS = {"build", ".venv", "node_modules"}
REASONS = {
    "a diagram", "a response", "a part of a file", "a part of a request", "figures of one machine",
    "needs a GPU", "needs Kubernetes", "needs root", "needs a download", "needs several machines",
    "needs another program", "needs a browser", "takes minutes", "changes the repository",
}  # fmt: skip
FENCE = re.compile(
    r"(?P<comments>(?:^ *<!-- [^\n]* -->\n)*)^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^ *```$"
    r"(?:\n\n```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
COMMENT = re.compile(r"<!-- (shown|file|check|with|before): (.+?) -->")
DATA = {"json", "yaml", "toml"}
SHELLS = {"console", "sh", "bash"}
PYTHON = {"python", "py"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: path in the repository.
        line: of its fence.
        printed: the text block behind Python.
        notes: the comments before it, as (kind, value).
    """

    page: str
    line: int
    language: str
    text: str
    printed: str = ""
    notes: list[tuple[str, str]] = field(default_factory=list)

    def note(self, kind: str) -> str:
        """The value of a comment; "" = none."""
        return next((value for name, value in self.notes if name == kind), "")

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    def replaced(self) -> str:
        """The text with what `with` says."""
        text = self.text
        for one in filter(None, self.note("with").split("; ")):
            old, _, new = one.partition("=")
            if old not in text:
                raise AssertionError(f"{self.place}: the block has no {old!r} to replace")
            text = text.replace(old, new)
        return text


def pages() -> list[str]:
    """All Markdown of the repository."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(str(path) for path in found if not NOT_OURS & set(path.parts))


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """The blocks of a page; what Python prints belongs to it."""
    text = (ROOT / page).read_text() if text is None else text
    found = []
    for one in FENCE.finditer(text):
        language, printed = one["language"], one["printed"]
        line = text.count("\n", 0, one.start("indent")) + 1
        body = re.sub(rf"^{one['indent']}", "", one["text"], flags=re.MULTILINE)
        is_python = language in PYTHON
        found.append(Block(page, line, language, body, (printed or "") * is_python, COMMENT.findall(one["comments"])))
        if printed is not None and not is_python:
            printed_line = text.count("\n", 0, one.start("printed"))
            found.append(Block(page, printed_line, "text", printed))
    return found


def commands(text: str) -> list[tuple[str, str]]:
    """(command, what it prints) of a console block."""
    found: list[tuple[str, str]] = []
    goes_on = False
    for line in text.splitlines(keepends=True):
        if goes_on:
            command, printed = found.pop()
            found.append((command + line, printed))
        elif line.startswith(("$ ", "# ")):
            found.append((line[2:], ""))
        else:
            command, printed = found.pop()
            found.append((command, printed + line))
            continue
        goes_on = line.rstrip("\n").endswith("\\") or has_open_quote(found[-1][0])
    return found


def has_open_quote(command: str) -> bool:
    """Whether a command goes on in the next line."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def shell_commands(block: Block) -> list[str]:
    """The commands of a console block, and those of a script that begin a line."""
    if block.language == "console":
        return [command for command, _ in commands(block.text)]
    found: list[str] = []
    for line in block.text.splitlines(keepends=True):
        if found and (found[-1].endswith("\\\n") or has_open_quote(found[-1])):
            found[-1] += line
        else:
            found.append(line)
    return found


def problem(block: Block) -> str:
    """What is wrong with a block as it is written; "" = it can be run, or its reason is one."""
    if shown := block.note("shown"):
        reason, _, runner = shown.partition("; run by ")
        if reason not in REASONS:
            return f"{reason!r} is not a reason of tests/docs/blocks.py"
        if runner and not is_runner(runner):
            return f"{runner!r} is neither a file nor a target of the Makefile"
        return unparsed(block)
    if block.language in PYTHON:
        is_asserting = bool(block.printed or block.note("file")) or "assert " in block.text
        return "" if is_asserting else "show what it prints, in a text block after it, or assert"
    if block.language in DATA:
        return (
            unparsed(block) if block.note("file") or block.note("check") else "give it a comment: file, check or shown"
        )
    if block.language in SHELLS:
        return unparsed(block)
    return "a block that is not executed has a comment with the reason: <!-- shown: a diagram -->"


def is_runner(name: str) -> bool:
    """Whether a test file or a target has this name."""
    if name.startswith("make "):
        return bool(re.search(rf"^(?:[\w-]+ )*{name[5:]}(?: [\w-]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE))
    return (ROOT / name).is_file()


def unparsed(block: Block) -> str:
    """Why a block cannot be read: data that is none, a command or flag of quire that there is not."""
    try:
        if block.language == "json" and block.note("shown") != "a part of a file":
            [json.loads(line) for line in block.text.splitlines() if line.strip()]
        elif block.language == "yaml":
            yaml.safe_load(block.text)
        elif block.language == "toml" and sys.version_info >= (3, 11):
            tomllib.loads(block.text)
        elif block.language in SHELLS:
            for command in shell_commands(block):
                parse_command(command)
    except (ValueError, yaml.YAMLError, QuireError) as error:
        return str(error)
    return ""


def parse_command(command: str) -> None:
    """Have the parser of quire's command line read a command.

    Raises:
        QuireError: a command or flag that there is not.
    """
    words = shlex.split(command.replace("$(", "(").replace("\\\n", " "), comments=True)
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[:1] != ["quire"]:
        return
    words = words[1 : next((i for i, word in enumerate(words) if word in ("|", ">", "&", "&&", "<")), None)]
    name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
    if name not in COMMANDS:
        if name in ("--help", "--version"):
            return
        raise QuireError(f"quire has no command {name!r}")
    module = importlib.import_module(COMMANDS[name][0])
    parser = QuireParser(prog=f"quire {name}")
    module.add_arguments(parser)
    parser.parse_args(words[len(name.split()) :])
