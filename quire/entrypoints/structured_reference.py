"""The reference page of structured output: which grammar library honours which keyword. Generated; no state."""

from __future__ import annotations

from quire.structured_output.schema_keywords import ANNOTATIONS, BY_TYPE, FORMATS, KEYWORDS, SUPPORTED

HEAD = """# Structured output: what is honoured

Generated from the table that requests are checked by (`quire/structured_output/schema_keywords.py`). The tests write
what a keyword forbids against every library that is said to honour it. A keyword may hold only in some places:
xgrammar, outlines and lm-format-enforcer honour `anyOf`, `allOf`, `enum`, `const` and `$ref` without other keywords
beside them (but `type` beside `enum` and `const`), and keywords about one type of value only beside that `type`.
lm-format-enforcer has further limits (`quire/structured_output/schema_lm_format_enforcer.py`). What one library does
not honour, the next one may; what none honours is refused with the keyword's path.
"""


def render_structured_reference() -> str:
    """The page, in Markdown."""
    libraries = [name for name, keywords in SUPPORTED.items() if keywords]
    lines = [
        f"| keyword | {' | '.join(libraries)} |",
        "| --- |" + " --- |" * len(libraries),
    ]
    for keyword in _in_order():
        marks = ["yes" if keyword in SUPPORTED[library] else "refused" for library in libraries]
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
        ]
    )


def _in_order() -> list[str]:
    """Every keyword once, those about one type of value together."""
    of_types = [keyword for keywords in BY_TYPE.values() for keyword in sorted(keywords)]
    return [*sorted(KEYWORDS - set(of_types)), *of_types]
