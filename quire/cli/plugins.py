"""List what installed packages add to Quire, by their metadata, and say what keeps a plugin from being used.

With --load each is imported, too, and its class and contract are checked. Exits with 1 when one cannot be used.
"""

from __future__ import annotations

import argparse

from quire.engine.named_plugins import built_in_names
from quire.errors import ConfigError
from quire.plugins import KINDS, Plugin, PluginKind, import_object, installed, load, problems_of

EXIT_PROBLEM = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `quire plugins`."""
    parser.add_argument("--load", action="store_true", help="Import each plugin and check its class and contract.")


def run(args: argparse.Namespace) -> int:
    """Print a line for each plugin; returns the exit status."""
    built_in, has_problem, lines = built_in_names(), False, []
    for kind in KINDS:
        problems = problems_of(kind, built_in[kind])
        for plugin in installed(kind):
            problem = problems.get(plugin) or (_load_problem(kind, plugin) if args.load else None)
            has_problem |= problem is not None
            lines.append(f"{plugin}, selected by {kind.setting}" + (f"\n  problem: {problem}" if problem else ""))
    print("\n".join(lines) or "no installed package has plugins (docs/how-to/plugins.md)")
    return EXIT_PROBLEM if has_problem else 0


def _load_problem(kind: PluginKind, plugin: Plugin) -> str | None:
    try:
        load(plugin, import_object(kind.base, kind.name, kind.setting))
    except ConfigError as error:
        return f"{error.message} ({error.hint})"
    return None
