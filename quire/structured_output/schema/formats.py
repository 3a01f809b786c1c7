"""Formats of strings as patterns, where the libraries' own let through what the format's standard forbids.

Sources: RFC 3339 (dates and times, with the lengths of months, leap years and leap seconds), RFC 4291 section 2.2 and
RFC 3986 section 3.2.2 (addresses), RFC 1123 (host names), RFC 5321 section 4.1.2 (mailboxes).
"""

from __future__ import annotations

_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"  # two digits, not 00, of a multiple of four
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAYS = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"({_YEAR}-{_DAYS}|{_LEAP_YEAR}-02-29)"

_HOUR = "([01][0-9]|2[0-3])"
_FRACTION = "(\\.[0-9]{1,9})?"
_OFFSET = f"([Zz]|[+\\-]{_HOUR}:[0-5][0-9])"


def _leap_second(hour: int) -> str:
    """The leap second, 23:59:60 UTC, by clocks on which it is `hour`, whole and half hours away from UTC."""
    whole = f"{hour:02}:59:60{_FRACTION}(\\+{(hour + 1) % 24:02}|-{23 - hour:02}):00"
    half = f"{hour:02}:29:60{_FRACTION}(\\+{hour:02}|-{23 - hour:02}):30"
    return f"{whole}|{half}"


_LEAP_SECONDS = "|".join(map(_leap_second, range(24)))
_PLAIN_TIME = f"{_HOUR}:[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}|23:59:60{_FRACTION}[Zz]"
_TIME = f"({_PLAIN_TIME}|{_LEAP_SECONDS})"

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"({_OCTET}\\.){{3}}{_OCTET}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_IPV6_FORMS = (
    f"({_GROUP}:){{7}}{_GROUP}",
    f"({_GROUP}:){{1,7}}:",
    *(f"({_GROUP}:){{1,{7 - after}}}(:{_GROUP}){{1,{after}}}" for after in range(1, 7)),
    f":((:{_GROUP}){{1,7}}|:)",
    f"({_GROUP}:){{6}}{_IPV4}",
    f"({_GROUP}:){{1,5}}:{_IPV4}",
    *(f"({_GROUP}:){{1,{5 - after}}}(:{_GROUP}){{1,{after}}}:{_IPV4}" for after in range(1, 5)),
    f":(:{_GROUP}){{0,5}}:{_IPV4}",
)
_IPV6 = f"({'|'.join(_IPV6_FORMS)})"

_LABEL = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-]{1,20}"
# At most 191 characters, and at most 62 before the @.
_MAILBOX = f"{_ATOM}(\\.{_ATOM}){{0,2}}"
_DOMAIN = f"{_LABEL}(\\.{_LABEL}){{1,2}}"
_QUOTED = '"[ !#-\\[\\]-~]{0,60}"'
_LITERAL = f"\\[({_IPV4}|IPv6:{_IPV6})\\]"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^({_PLAIN_TIME})$",
    "date-time": f"^{_DATE}[Tt]({_PLAIN_TIME})$",
    "ipv4": f"^{_IPV4}$",
    "hostname": f"^{_LABEL}(\\.{_LABEL}){{0,2}}$",
    "email": f"^{_MAILBOX}@{_DOMAIN}$",
}
"""For xgrammar, which writes texts of a pattern as they are, and makes masks for each of its states in advance: no
quotes, and leap seconds by UTC alone."""

FORMATS_IN_FULL = FORMATS | {
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "ipv6": f"^{_IPV6}$",
    "email": f"^({_MAILBOX}|{_QUOTED})@({_DOMAIN}|{_LITERAL})$",
}
"""For llguidance, which writes a pattern's texts with escapes, and makes masks as they are needed."""

EXPENSIVE = frozenset(("hostname", "email", "ipv6"))
"""Formats for which xgrammar needs seconds with a large vocabulary."""
