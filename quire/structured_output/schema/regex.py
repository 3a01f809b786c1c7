r"""Regular expressions as all grammar libraries read them alike: what they would not is refused. Pure functions.

Classes are ASCII (`\d`, `\w`, `\s`), the whole text must match, and anchors stand at the ends alone.
"""

from __future__ import annotations

from quire.structured_output.capabilities import Capabilities
from quire.structured_output.schema.regex_normal import RegexError, normal

MAX_CHARS = 1 << 16
_CLASSES = frozenset("dDwWsS")
_CONTROLS = frozenset("nrtfv")
_HEX = {"x": 2, "u": 4}
_ESCAPED = frozenset(('"', "\\", "control", "hex", "space"))
_PUNCTUATION = frozenset("^$\\.*+?()[]{}|/-\"'!#%&,:;<=>@_`~ ")


def regex_problem(pattern: str, library: Capabilities | None = None) -> str | None:
    """What of `pattern` is refused, in words, or what of it `library` does not honour; None when nothing is."""
    if len(pattern) > MAX_CHARS:
        return f"more than {MAX_CHARS} characters"
    found = _scanned(pattern)
    if not isinstance(found, frozenset):
        return found
    if library is not None and "negated" in found - library.regex_features:
        return "a negated class may match half of a surrogate pair"
    return None


def without_anchors(pattern: str) -> str:
    """A pattern that is not refused, without the anchors at its ends: it must match the whole text anyway."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$"):
        body = pattern[:-1]
        if (len(body) - len(body.rstrip("\\"))) % 2 == 0:
            return body
    return pattern


def pattern_problem(pattern: str, library: Capabilities) -> str | None:
    """As `regex_problem`, of a `pattern` within a JSON schema."""
    if len(pattern) > MAX_CHARS:
        return f"a pattern of more than {MAX_CHARS} characters is not supported"
    found = _scanned(pattern)
    if not isinstance(found, frozenset):
        return found
    # Where its texts stand between quotes as they are, nothing may match that JSON writes otherwise.
    if "escaped" not in library.pattern_features and found & _ESCAPED:
        return "a pattern that matches quotes, backslashes or control characters is not supported"
    if "negated" in found - library.pattern_features:
        return "a negated class may match half of a surrogate pair, or characters that JSON escapes"
    return None if library.check_pattern is None else library.check_pattern(pattern, found)


def _scanned(pattern: str) -> str | frozenset[str]:
    """As `_scan`, and what is refused only when the pattern is read as a whole."""
    found = _scan(pattern)
    if isinstance(found, frozenset):
        try:
            normal(pattern)
        except RegexError as error:
            return str(error)
    return found


def _scan(pattern: str) -> str | frozenset[str]:
    """What is refused; else what the pattern holds of quotes, backslashes, control characters, and their escapes."""
    held: set[str] = set()
    at, end, in_class, depth = 0, len(pattern), False, 0
    while at < end:
        char = pattern[at]
        at += 1
        if char == "\\":
            problem, at = _escape(pattern, at, held)
            if problem is not None:
                return problem
        elif ord(char) < 0x20:
            held.add("control")
        elif char == '"':
            held.add(char)
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            if pattern.startswith("^", at):
                held.add("negated")
                at += 1
            if pattern.startswith("]", at):
                return "']' as the first character of a class"
        elif char == ")":
            depth -= 1
            if depth < 0:
                return "')' without '('"
        elif char == ".":
            held.add("negated")
        elif char == "(" and pattern.startswith("?", at) and not pattern.startswith("?:", at):
            return f"'(?{pattern[at + 1 : at + 2]}', a special group"
        elif char == "(":
            depth += 1
        elif char == "|" and depth == 0:
            held.add(char)
        elif char in "*+?}" and pattern.startswith("+", at):
            return "a possessive quantifier"
        elif char in "^$":
            if at != (1 if char == "^" else end):
                return f"{char!r} within the pattern"
            held.add("^$")
    if in_class or depth:
        return "an unclosed class or group"
    return frozenset(held)


def _escape(pattern: str, at: int, held: set[str]) -> tuple[str | None, int]:
    """What is wrong with the escape whose character is at `at`, and where it ends."""
    char = pattern[at : at + 1]
    if char in _HEX:
        digits = pattern[at + 1 : at + 1 + _HEX[char]]
        if len(digits) != _HEX[char] or any(one not in "0123456789abcdefABCDEF" for one in digits):
            return f"'\\{char}' without {_HEX[char]} hexadecimal digits", at
        held.add("hex")
        return None, at + 1 + _HEX[char]
    if char == "\\" or char == '"':
        held.add(char)
    elif char in _CONTROLS and char:
        held.add("control")
    elif char == "s":
        held.add("space")
    elif char in ("D", "W", "S"):
        held.add("negated")
    if not char or not (char in _CLASSES or char in _CONTROLS or char in _PUNCTUATION):
        return f"'\\{char}'", at
    return None, at + 1
