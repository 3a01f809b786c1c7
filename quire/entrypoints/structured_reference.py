"""The reference page of structured output: which grammar library honours which keyword. Generated; no state."""

from __future__ import annotations

from quire.config.structured_outputs import BACKENDS
from quire.entrypoints.structured_narrower import NARROWER
from quire.structured_output.registry import capabilities_of
from quire.structured_output.schema.keywords import ANNOTATIONS, BY_TYPE, FORMATS, KEYWORDS

HEAD = """# Structured output: supported schemas

Generated from the declared support of each library (`capabilities` in `quire/structured_output/backends`). The tests
try to generate what a keyword forbids with every library that supports it. Support may depend on the place:
xgrammar, outlines and lm-format-enforcer support `anyOf`, `allOf`, `enum`, `const` and `$ref` without other keywords
next to them (except `type` with `enum` and `const`), and keywords about one type of value only with that `type`.
lm-format-enforcer has further limits (`quire/structured_output/schema/lm_format_enforcer.py`). What one library does
not support, the next one may; what none supports is rejected with the keyword's path.
"""

NARROWER_HEAD = """## Valid, but never written

An answer may be narrower than its schema: properties come in the order of the schema, and an object with a `type`
that names `properties` and says nothing of others has no others. Where other names may follow the declared ones, no
text holds an escape of a character that needs none (`\\u0061`, `\\/`), and a character that needs one has the shortest.
Fractions of a second have at most nine digits, and a leap second has an offset of whole or half hours from UTC.
A schema without `type` says nothing of values of other types, and is followed by that; only where no library can, it is
taken for one of the type that `properties`, `items` or `prefixItems` are about.

Of the official JSON-Schema-Test-Suite, drafts 7 and 2020-12 with formats (`make test-json-schema`), these valid
instances cannot be written; no invalid one can:
"""


def render_structured_reference() -> str:
    """The page, in Markdown."""
    honoured = {name: capabilities_of(name).keywords for name in BACKENDS}
    libraries = [name for name, keywords in honoured.items() if keywords]
    lines = [
        f"| keyword | {' | '.join(libraries)} |",
        "| --- |" + " --- |" * len(libraries),
    ]
    for keyword in _in_order():
        marks = ["yes" if keyword in honoured[library] else "refused" for library in libraries]
        lines.append(f"| `{keyword}` | {' | '.join(marks)} |")
    formats = ", ".join(f"`{one}`" for one in sorted(FORMATS))
    annotations = ", ".join(f"`{one}`" for one in sorted(ANNOTATIONS))
    return "\n".join(
        [
            HEAD,
            *lines,
            "",
            f"Values of `format`: {formats}.",
            "",
            f"Annotations, which forbid nothing: {annotations}.",
            "",
            *_narrower(),
        ]
    )


def _narrower() -> list[str]:
    lines = [NARROWER_HEAD]
    for why, drafts, file, tests in NARROWER:
        lines.append(f"- {why} ({' and '.join(drafts)}, `{file}`)")
        lines += [f"  - {schema}: {instance}" for schema, instance in tests]
    return [*lines, ""]


def _in_order() -> list[str]:
    """Every keyword once, those about one type of value together."""
    of_types = [keyword for keywords in BY_TYPE.values() for keyword in sorted(keywords)]
    return [*sorted(KEYWORDS - set(of_types)), *of_types]
