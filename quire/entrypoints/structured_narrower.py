"""Valid instances of the official JSON-Schema-Test-Suite that cannot be written, and why. Data of a reference page.

`make test-json-schema` compares the list with what it finds.
"""

from __future__ import annotations

BOTH = ("draft7", "draft2020-12")
_FLOATS = "A number of `const` or `enum` is written in one way: a whole one without decimals."
_FORMATS = "`format` is honoured, although draft 2020-12 calls it an annotation by default."
_FORMAT_NAMES = ("email", "ipv4", "ipv6", "hostname", "date", "date-time", "time", "uri", "uuid", "duration")

# (why, drafts, file, (schema, instance) by their descriptions there).
NARROWER: tuple[tuple[str, tuple[str, ...], str, tuple[tuple[str, str], ...]], ...] = (
    (
        _FLOATS, BOTH, "const.json",
        (
            ("const with 0 does not match other zero-like types", "float zero is valid"),
            ("const with 1 does not match true", "float one is valid"),
            ("const with -2.0 matches integer and float types", "float -2.0 is valid"),
            ("float and integers are equal up to 64-bit representation limits", "float is valid"),
        ),
    ),
    (
        _FLOATS, BOTH, "enum.json",
        (
            ("enum with 0 does not match false", "float zero is valid"),
            ("enum with [0] does not match [false]", "[0.0] is valid"),
            ("enum with 1 does not match true", "float one is valid"),
            ("enum with [1] does not match [true]", "[1.0] is valid"),
        ),
    ),
    (
        "An `integer` is written without decimals.", BOTH, "type.json",
        (("integer type matches integers", "a float with zero fractional part is an integer"),),
    ),
    (
        "Keywords next to `$ref` are honoured, although draft 7 ignores them.", ("draft7",), "ref.json",
        (("ref overrides any sibling keywords", "ref valid, maxItems ignored"),),
    ),
    (
        _FORMATS, ("draft2020-12",), "format.json",
        tuple(
            (f"{name} format", f"invalid {name} string is only an annotation by default") for name in _FORMAT_NAMES
        ),
    ),
)  # fmt: skip


def narrower_names() -> set[str]:
    """Their names: draft, file, schema and instance."""
    return {
        f"{draft}/{file}: {schema}: {instance}"
        for _, drafts, file, tests in NARROWER
        for draft in drafts
        for schema, instance in tests
    }
