"""The other forms in which vLLM's users write flags, rewritten to the one form that the parser knows.

`--max_model_len`, `--structured-outputs-config.backend xgrammar`, `-O3`, `-cc.mode 3`, `-asc 2`. Called by
`QuireParser` before it parses; pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.errors import ConfigError

SHORT = {
    "-O": "--optimization-level", "-cc": "--compilation-config", "-ac": "--attention-config",
    "-sc": "--speculative-config", "-dc": "--diffusion-config", "-asc": "--api-server-count",
    "-ep": "--enable-expert-parallel", "-dpn": "--data-parallel-rank", "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local", "-dpa": "--data-parallel-address", "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend", "-dph": "--data-parallel-hybrid-lb", "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size", "-dpe": "--data-parallel-external-lb", "-n": "--nnodes",
    "-r": "--node-rank",
}  # fmt: skip
DOTTED_SHORT = {**SHORT, "-O": "--compilation-config"}
LEVEL = re.compile(r"-O=?(\d)")
DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+)(\+)?", re.ASCII)
NUMBER = re.compile(r"-[\d.]")


def plain_argv(argv: Sequence[str], flags: Collection[str]) -> list[str]:
    """`argv` in the forms that a parser with `flags` knows; what is in no known form stays as it is.

    Several dotted flags of one name become one flag with a JSON object, at the end.

    Raises:
        ConfigError: a name is given as an object and by its keys, or a key has two values.
    """
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            plain += [token, *rest]
            break
        name, equals, value = token.partition("=")
        dotted = None if name in flags else _dotted(name, flags)
        if dotted is None:
            plain.append(token if name in flags else _plain(name, flags) + equals + value)
            continue
        flag, keys, is_list = dotted
        if not equals:
            value = rest.pop(0) if rest and _is_value(rest[0]) else "true"
        _put(objects.setdefault(flag, {}), flag, keys, loose(value), is_list=is_list)
    for flag, given in objects.items():
        if any(token.partition("=")[0] == flag for token in plain):
            raise ConfigError(f"{flag} is given as an object and by its keys", hint="use one of the two forms")
        end = plain.index("--") if "--" in plain else len(plain)
        plain.insert(end, f"{flag}={json.dumps(given)}")
    return plain


def merge_dotted(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config file with those named like `a.b` inside the object `a`.

    Raises:
        ConfigError: as `plain_argv`.
    """
    merged = {name: value for name, value in values.items() if "." not in name}
    for name, value in values.items():
        first, _, keys = name.partition(".")
        if keys:
            if not isinstance(merged.setdefault(first, {}), dict) or first in values:
                raise ConfigError(
                    f"{first} is given as an object and by its keys", hint="use one of the two forms", field=first
                )
            _put(merged[first], first, keys.split("."), value, is_list=False)
    return merged


def loose(text: Any) -> Any:
    """The value that a text stands for: JSON when it is, else the text."""
    if not isinstance(text, str):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _dotted(name: str, flags: Collection[str]) -> tuple[str, list[str], bool] | None:
    """(flag, keys, whether the value is added to a list) of `--flag.key.key`, when the flag is known."""
    match = DOTTED.fullmatch(name)
    if match is None:
        return None
    flag = DOTTED_SHORT.get(match[1]) or match[1].replace("_", "-")
    return (flag, match[2].split("."), match[3] is not None) if flag in flags else None


def _plain(name: str, flags: Collection[str]) -> str:
    level = LEVEL.fullmatch(name)
    if level is not None and SHORT["-O"] in flags:
        return f"{SHORT['-O']}={level[1]}"
    if SHORT.get(name) in flags:
        return SHORT[name]
    return name.replace("_", "-") if name.startswith("--") else name


def _is_value(token: str) -> bool:
    return not token.startswith("-") or NUMBER.match(token) is not None


def _put(target: dict[str, Any], flag: str, keys: Sequence[str], value: Any, *, is_list: bool) -> None:
    *outer, last = [key.replace("-", "_") for key in keys]
    for key in outer:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{flag}: {key} has a value and keys", hint="give one of the two")
    if is_list:
        items = target.setdefault(last, [])
        if isinstance(items, list):
            items.append(value)
            return
    if last in target:
        raise ConfigError(f"{flag}: {last} is given twice", hint="give it once")
    target[last] = value
