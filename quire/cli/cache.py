"""Look after a directory of KV-cache blocks, as --kv-disk names it.

    quire cache list /var/cache/quire-kv
    quire cache verify /var/cache/quire-kv --remove
    quire cache clear /var/cache/quire-kv --namespace 5244ef88f64ad7c6c8f6f9a38e163b60

Servers may use the directory meanwhile. `verify` ends with status 1 where a file is damaged and was not removed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from quire.errors import ConfigError
from quire.kv_offload.upkeep import Namespace, check_directory, clear, namespaces, verify
from quire.utils.memory import format_bytes

ACTIONS = ("list", "verify", "clear")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("action", choices=ACTIONS, help="What to do.")
    parser.add_argument("path", metavar="PATH", type=Path, help="The directory that --kv-disk names.")
    parser.add_argument("--namespace", metavar="DIGITS", help="Only this one, as `list` shows it, or its first digits.")
    parser.add_argument("--remove", action="store_true", help="verify: remove damaged files.")
    parser.add_argument("--json", action="store_true", help="list: print one JSON list.")


def run(args: argparse.Namespace) -> int:
    """Do it, and print what was done."""
    root = args.path.expanduser()
    check_directory(root)
    chosen = _chosen(namespaces(root), args.namespace)
    if args.action == "list":
        _list(chosen, as_json=args.json)
        return 0
    if args.action == "clear":
        for one in chosen:
            print(f"{one.name}: {format_bytes(clear(root, one.name))} removed")
        return 0
    return max([_verify(root, one, should_remove=args.remove) for one in chosen], default=0)


def _chosen(found: list[Namespace], digits: str | None) -> list[Namespace]:
    chosen = [one for one in found if one.name.startswith(digits or "")]
    if digits and not chosen:
        known = ", ".join(one.name for one in found) or "it is empty"
        raise ConfigError(f"no namespace begins with {digits!r}", hint=f"there are: {known}", field="namespace")
    return chosen


def _list(chosen: list[Namespace], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(one) for one in chosen], indent=1))
        return
    for one in chosen:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used_s)) if one.used_s else "never"
        model, dtype = one.about.get("model", "?"), one.about.get("kv_cache_dtype", "?")
        print(
            f"{one.name}  {one.num_blocks} blocks  {format_bytes(one.num_bytes)}  last used {used}  {model} ({dtype})"
        )


def _verify(root: Path, one: Namespace, *, should_remove: bool) -> int:
    num_damaged = 0
    for path, fault in verify(root, one.name):
        num_damaged += 1
        print(f"{path}: {fault}")
        if should_remove:
            path.unlink(missing_ok=True)
    removed = ", removed" if should_remove and num_damaged else ""
    print(f"{one.name}: {one.num_blocks} blocks, {num_damaged} damaged{removed}")
    return 1 if num_damaged and not should_remove else 0
