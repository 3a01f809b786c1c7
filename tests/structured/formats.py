"""Whether a text has a `format` of JSON Schema, by the syntax that the format's own standard gives."""

from __future__ import annotations

import ipaddress
import re

_DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOUR_PART = r"(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_DAY_PART = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r"\"([\x20-\x21\x23-\x5b\x5d-\x7e]|\\[\x20-\x7e])*\""
_URI_CHAR = r"([A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"
# RFC 3339 (dates and times; that a month has such a day is no syntax), 5321, 1123, 4122, 3986 and 6901.
_SYNTAX = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "duration": rf"P({_DAY_PART}(T{_HOUR_PART})?|T{_HOUR_PART}|\d+W)",
    "hostname": rf"{_LABEL}(\.{_LABEL})*",
    "email": rf"({_ATOM}(\.{_ATOM})*|{_QUOTED})@(\[[^\]]+\]|{_LABEL}(\.{_LABEL})*)",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_URI_CHAR}*",
    "json-pointer": r"(/([^~/]|~[01])*)*",
}


def has_format(name: str, text: str) -> bool:
    """Whether `text` has the format `name`; unknown formats forbid nothing."""
    if name in ("ipv4", "ipv6"):
        try:
            ipaddress.ip_address(text)
        except ValueError:
            return False
        return (":" in text) == (name == "ipv6")
    if name == "regex":
        try:
            re.compile(text)
        except re.error:
            return False
        return True
    return name not in _SYNTAX or re.fullmatch(_SYNTAX[name], text, re.ASCII) is not None
