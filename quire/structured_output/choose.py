"""Which grammar library a request gets: the first that honours the whole of what it asks for. Pure functions.

Called by the input processor, before the request is sent to the engine core. Loads no library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.call_grammar import CallGrammar, Regex, Schema, parts_of, with_parts
from quire.core.structured_outputs import MAX_TAG_DEPTH, StructuredOutputsParams, json_text, parse_json
from quire.errors import UnsupportedError, ValidationError
from quire.structured_output.capabilities import Capabilities
from quire.structured_output.interface import GrammarSpec
from quire.structured_output.registry import backends_for, capabilities_of, is_installed
from quire.structured_output.schema.additional_properties import with_closed_objects
from quire.structured_output.schema.forms import simplified, with_types
from quire.structured_output.schema.patterns import with_normal_patterns
from quire.structured_output.schema.problems import find_problem, formats_of
from quire.structured_output.schema.regex import regex_problem, without_anchors
from quire.structured_output.schema.regex_normal import normal
from quire.structured_output.schema.well_formed import malformed
from quire.structured_output.structural_tags import grammar_of_text, read_tag, schemas_of, tag_of, with_schemas


def resolve_structured_outputs(
    params: StructuredOutputsParams, config: StructuredOutputsConfig
) -> StructuredOutputsParams:
    """`params` with the engine's settings applied and `backend` chosen.

    Raises:
        ValidationError: no library that may be used honours all of it; the keyword is named by its path.
        UnsupportedError: no library is installed.
    """
    return next(honouring(params, config))


def honouring(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> Iterator[StructuredOutputsParams]:
    """`params` for every library that honours all of it, the preferred one first; at least one.

    Raises:
        ValidationError: as `resolve_structured_outputs`.
        UnsupportedError: no library is installed.
    """
    field = params.field
    value = _plain(params, field)
    candidates = _candidates(params, config)
    if params.kind == "json" and (formats := formats_of(value)):
        candidates = sorted(candidates, key=lambda backend: not capabilities_of(backend).fast_formats & formats)
    reasons: dict[str, str] = {}
    found: set[str] = set()
    for one in [value, with_types(value)] if params.kind == "json" else [value]:
        for backend in candidates:
            if backend in found:
                continue
            library = capabilities_of(backend)
            reason: str | None = "it is not installed"
            if is_installed(backend):
                reason = _whitespace_problem(params, library) or _problem(params.kind, one, library)
            if reason is None:
                found.add(backend)
                yield _resolved(params, one, backend, config)
            reasons[backend] = reason or ""
    if found:
        return
    if all(not is_installed(backend) for backend in candidates):
        raise UnsupportedError(
            f"structured_outputs needs {' or '.join(candidates)}, which is not installed",
            hint="pip install 'quire[structured]'", field=field,
        )  # fmt: skip
    told = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
    raise ValidationError(
        f"no grammar backend supports {field} ({told})",
        hint="leave out the unsupported keyword, and validate it in the client", field=field,
    )  # fmt: skip


def with_fallbacks(spec: GrammarSpec) -> Iterator[GrammarSpec]:
    """`spec`, and it for every other library that honours it, each when it is asked for."""
    yield spec
    if not spec.may_fall_back:
        return
    value = json.loads(spec.text) if spec.kind in ("json", "choice") else spec.text
    if spec.kind == "structural_tag":
        value = grammar_of_text(spec.text)
    for backend in _knowing(spec.kind, spec.text):
        if backend == spec.backend or not is_installed(backend):
            continue
        library = capabilities_of(backend)
        if _whitespace_problem(spec, library) is None and _problem(spec.kind, value, library) is None:
            yield msgspec.structs.replace(spec, backend=backend)


def _plain(params: StructuredOutputsParams, field: str) -> Any:
    """The value as plain data, its form checked as far as no library matters."""
    value = getattr(params, params.kind)
    if params.kind == "json":
        value = parse_json(field, value)
        if not isinstance(value, (dict, bool)):
            raise ValidationError(f"{field} is not a valid JSON schema", hint="a schema is an object", field=field)
        problem = malformed(value)
        if problem is not None:
            raise ValidationError(f"{field} at {problem}", hint="correct the schema", field=field)
        value = simplified(value)
    elif params.kind == "regex":
        reason = regex_problem(value)
        if reason is not None:
            raise ValidationError(f"{field} has {reason}", hint="leave it out", field=field)
        value = normal(without_anchors(value))
    elif params.kind == "structural_tag":
        value = _grammar(params, field)
        for path, schema in schemas_of(value):
            problem = malformed(schema)
            if problem is not None:
                told = f"{field} at #{path}{problem.path}: {problem.reason}"
                raise ValidationError(told, hint="correct the schema", field=field)
        value = with_schemas(value, lambda schema: with_types(simplified(schema)))
    return value


def _grammar(params: StructuredOutputsParams, field: str) -> CallGrammar:
    """That of a structural tag."""
    if params.call_grammar is None:
        return read_tag(field, parse_json(field, params.structural_tag, MAX_TAG_DEPTH))
    parse_json(field, tag_of(params.call_grammar), MAX_TAG_DEPTH)  # schemas of tools, of any size
    return params.call_grammar


def _candidates(params: StructuredOutputsParams, config: StructuredOutputsConfig) -> Sequence[str]:
    """Libraries that may be used, in the order of preference."""
    known = _knowing(params.kind, params.grammar, config.backend)
    if config.backend == "auto":
        return known
    if config.backend not in known:
        raise ValidationError(
            f"{params.field} ({params.kind}) is not supported by {config.backend}, the configured backend",
            hint=f"start the engine with structured_outputs_backend=auto, or one of {', '.join(known)}",
            field=params.field,
        )
    return (config.backend,)


def _knowing(kind: str, text: str | None, setting: str = "auto") -> Sequence[str]:
    """Libraries that know `kind` at all, that of the settings among them; EBNF has `::=`, Lark has not."""
    if kind == "grammar":
        kind = "ebnf" if text is not None and "::=" in text else "lark"
    return backends_for(kind, beside=None if setting == "auto" else setting)


def _whitespace_problem(asked: StructuredOutputsParams | GrammarSpec, library: Capabilities) -> str | None:
    if asked.whitespace_pattern is None or library.has_whitespace_pattern:
        return None
    return "whitespace_pattern is not supported"


def _problem(kind: str, value: Any, library: Capabilities) -> str | None:
    """Why `library` cannot honour it."""
    if kind == "json":
        if value is False:
            return "no value satisfies the schema false"
        problem = find_problem(value, library)
        return None if problem is None else str(problem)
    if kind == "regex":
        return regex_problem(value, library)
    if kind == "structural_tag":
        return _tag_problem(value, library)
    if kind == "choice" and library.max_choices is not None and len(value) > library.max_choices:
        return f"more than {library.max_choices} choices are not supported"
    return None


def _tag_problem(grammar: CallGrammar, library: Capabilities) -> str | None:
    """Why `library` cannot honour a structural tag, or a schema somewhere in it."""
    for path, schema in schemas_of(grammar):
        problem = find_problem(schema, library)
        if problem is not None:
            return f"#{path}{problem.path}: {problem.reason}"
    for path, part in parts_of(grammar, "/format"):
        reason = regex_problem(_normal(part.pattern, library), library) if isinstance(part, Regex) else None
        if reason is not None:
            return f"#{path}/pattern: {reason}"
    return None if library.check_tag is None else library.check_tag(grammar)


def _with_normal_regexes(grammar: CallGrammar, library: Capabilities) -> CallGrammar:
    def changed(part: CallGrammar) -> CallGrammar:
        return Regex(_normal(part.pattern, library)) if isinstance(part, Regex) else part

    return with_parts(grammar, changed)


def _with_whitespace_limit(grammar: CallGrammar, limit: int | None) -> CallGrammar:
    """Schemas that say nothing of it allow so many optional whitespace characters in a row."""

    def changed(part: CallGrammar) -> CallGrammar:
        is_open = isinstance(part, Schema) and part.max_whitespace_cnt is None
        return msgspec.structs.replace(part, max_whitespace_cnt=limit) if is_open else part

    return grammar if limit is None else with_parts(grammar, changed)


def _normal(pattern: str, library: Capabilities) -> str:
    """A regular expression of a structural tag as `library` gets it."""
    return normal(without_anchors(pattern), has_negated="negated" in library.regex_features)


def _resolved(
    params: StructuredOutputsParams, value: Any, backend: str, config: StructuredOutputsConfig
) -> StructuredOutputsParams:
    is_closed = params.disable_additional_properties or config.disable_additional_properties
    if params.kind == "json":
        value = json_text(params.field, with_normal_patterns(with_closed_objects(value, always=is_closed)))
    elif params.kind == "structural_tag":
        value = _with_normal_regexes(value, capabilities_of(backend))
        value = with_schemas(value, lambda schema: with_normal_patterns(with_closed_objects(schema, always=is_closed)))
        value = json_text(params.field, tag_of(_with_whitespace_limit(value, config.max_whitespace_cnt)))
    changes: dict[str, Any] = {
        params.kind: value,
        "call_grammar": None,
        "backend": backend,
        "may_fall_back": config.backend == "auto",
        "max_whitespace_cnt": config.max_whitespace_cnt,
        "disable_any_whitespace": params.disable_any_whitespace or config.disable_any_whitespace,
    }
    return msgspec.structs.replace(params, **changes)
