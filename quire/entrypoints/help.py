"""`--help` by topic: a command with many flags first says which topics it has. Used by `QuireParser`; no state."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from quire.errors import unknown_name
from quire.utils.other_names import FLAGS

ALL = "all"
LIST = "listgroup"  # as vLLM calls it
MAX_FLAGS_AT_ONCE = 40


class HelpAction(argparse.Action):
    """Prints what was asked for and ends the process: `--help`, `--help=TOPIC`, `--help=all`, `--help=WORD`."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Print."""
        print(help_text(parser, values))
        parser.exit()


def help_text(parser: argparse.ArgumentParser, topic: str | None = None) -> str:
    """What `--help=topic` prints; a word that is no topic finds flags that have it in their name or text.

    Raises:
        ConfigError: it finds nothing.
    """
    groups = {group.title: group for group in parser._action_groups if group.title and _shown(group._group_actions)}
    num_flags = sum(len(_shown(group._group_actions)) for group in groups.values())
    if topic == ALL or (topic is None and num_flags <= MAX_FLAGS_AT_ONCE):
        return parser.format_help()
    if topic is None or topic == LIST:
        return _overview(parser, groups)
    word = topic.lower()
    for title, group in groups.items():
        if word in (title.lower(), f"{title}config".lower()):
            return _section(parser, title, group.description, group._group_actions)
    flag_part, spaced = word.lstrip("-").replace("_", "-"), word.replace("-", " ").replace("_", " ")
    found = [
        action
        for group in groups.values()
        for action in _shown(group._group_actions)
        if any(flag_part in flag for flag in action.option_strings) or spaced in (action.help or "").lower()
    ]
    if not found:
        elsewhere = {flag.lstrip("-"): hint for flag, hint in FLAGS.items()}
        raise unknown_name("topic of --help", topic, [*groups, ALL], elsewhere=elsewhere)
    return _section(parser, f"flags with {topic!r}", None, found)


def _shown(actions: Sequence[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.help is not argparse.SUPPRESS]


def _overview(parser: argparse.ArgumentParser, groups: dict[str, Any]) -> str:
    titles = [title for title in groups if title not in ("positional arguments", "options")]
    width = max(map(len, titles))
    positionals = "".join(f" [{action.metavar or action.dest}]" for action in parser._get_positional_actions())
    lines = [f"usage: {parser.prog}{positionals} [--FLAG VALUE ...]", "", parser.description or "", "", "topics:"]
    for title in titles:
        flags = len(_shown(groups[title]._group_actions))
        about = f"{groups[title].description or ''} ({flags} {'flag' if flags == 1 else 'flags'})".strip()
        lines.append(f"  {title:<{width}}  {about}")
    lines += [
        "",
        "--help=TOPIC shows the flags of a topic, --help=WORD those that have a word in their name or text,",
        "--help=all every flag. Every flag is a setting of --config files, too.",
    ]
    return "\n".join(lines)


def _section(parser: argparse.ArgumentParser, title: str, about: str | None, actions: Sequence[argparse.Action]) -> str:
    formatter = parser._get_formatter()
    formatter.start_section(title)
    formatter.add_text(about)
    formatter.add_arguments(_shown(actions))
    formatter.end_section()
    return formatter.format_help().rstrip()
