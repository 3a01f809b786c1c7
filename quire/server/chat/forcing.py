"""Calls that an answer must have, as the form of the answer: from a request's tools to `StructuredOutputsParams`.

Called when a chat is read. Pure functions. A schema that no grammar library honours is an error where calls are
required or the function is strict; beside a `response_format` the arguments of others are any object, and a warning
says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.call_grammar import CallGrammar, Choice, Schema
from quire.core.structured_outputs import StructuredOutputsParams, parse_json
from quire.errors import UnsupportedError, ValidationError
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.forced import ANY_ARGUMENTS, CallForm, arguments_schema, calls_among_text, forced_calls
from quire.parsers.registry import UNFORCED
from quire.parsers.xml_arguments import without_problems, xml_problem
from quire.server.chat.protocol.tools import CHOICE_FIELD, TOOLS_FIELD, Tool, ToolChoice
from quire.server.chat.protocol.warnings import Warnings
from quire.structured_output.registry import backends_for, capabilities_of, is_installed
from quire.structured_output.schema.forms import simplified, with_types
from quire.structured_output.schema.problems import find_problem
from quire.structured_output.schema.well_formed import malformed


@dataclass(frozen=True, slots=True)
class CallWriter:
    """How calls are written by a model, and by what that can be held.

    Attributes:
        syntax: of the format that is read; None = it cannot be forced.
        special: text -> id of the vocabulary's control tokens.
        config: which grammar libraries may be used.
    """

    syntax: CallSyntax | None
    special: Mapping[str, int]
    config: StructuredOutputsConfig


def grammar_for(
    choice: ToolChoice, response_format: StructuredOutputsParams | None, writer: CallWriter, warnings: Warnings
) -> StructuredOutputsParams | None:
    """The form of an answer that may, or must, call tools; None = any.

    Calls that are required are the whole answer. With a `response_format` of JSON the answer is that or calls; another
    stays as it is, and the answer is no call. Else the answer is free, but for the calls of strict functions.

    Args:
        choice: at least one tool.
        warnings: gets a line for each schema that is not followed, and for what has no effect.

    Raises:
        UnsupportedError: calls are required in a format that cannot be forced.
        ValidationError: the schema of a function that must be called, or is strict, cannot be followed.
    """
    if choice.is_required:
        return StructuredOutputsParams(call_grammar=_forced(choice, writer, warnings), source=CHOICE_FIELD)
    if response_format is None:
        strict = _strict(choice, writer, warnings)
        return None if strict is None else StructuredOutputsParams(call_grammar=strict, source=TOOLS_FIELD)
    if response_format.kind not in ("json", "json_object") or writer.syntax is None:
        warnings.advise(f"tools: the output follows {response_format.field}, so it is not a tool call")
        return response_format
    schema = (
        parse_json(response_format.field, response_format.json) if response_format.json is not None else ANY_ARGUMENTS
    )
    either = Choice((Schema(schema), _forced(choice, writer, warnings)))
    return StructuredOutputsParams(call_grammar=either, source=response_format.field)


def _forced(choice: ToolChoice, writer: CallWriter, warnings: Warnings) -> CallGrammar:
    """Answers that are calls and nothing else."""
    syntax = writer.syntax
    if syntax is None:
        raise UnsupportedError(
            "tool_choice: calls cannot be forced in this server's tool call format",
            hint="use tool_choice auto; or start the server with the --tool-call-parser of another format (all but "
            f"{', '.join(sorted(UNFORCED))}; pattern with `call` in its format)",
            field=CHOICE_FIELD,
        )
    schemas = _schemas(choice.tools)
    backends = backends_for("structural_tag")
    usable = _installed(backends, writer.config) or backends
    if choice.is_required:
        _check_followed(schemas, usable)
    problems = _problems(schemas, syntax, usable)
    forms = []
    for tool, (where, schema), problem in zip(_by_name(choice.tools), schemas, problems, strict=True):
        if problem is not None:
            _check_not_strict(tool, where, problem)
            warnings.advise(f"{where}.function.parameters: arguments are not checked against the schema ({problem})")
            schema = without_problems(schema) if syntax.parameters is not None else ANY_ARGUMENTS
        forms.append(CallForm(tool["function"]["name"], schema))
    return forced_calls(syntax, forms, writer.special, is_one=choice.is_one)


def _strict(choice: ToolChoice, writer: CallWriter, warnings: Warnings) -> CallGrammar | None:
    """Answers that are free but for their calls; None when no function is strict, or none can be."""
    tools, syntax = _by_name(choice.tools), writer.syntax
    if not any(tool["function"].get("strict") for tool in tools):
        return None
    is_possible = syntax is not None and bool(syntax.openers)
    backends = backends_for("structural_tag", tag="any_text")
    if syntax is None or not is_possible or not _installed(backends, writer.config):
        reason = (
            f"it needs {' or '.join(backends)}" if is_possible else "this server's tool call format does not support it"
        )
        warnings.advise(f"tools: strict has no effect ({reason}): arguments are not constrained")
        return None
    strict = [tool for tool in tools if tool["function"].get("strict")]
    schemas = _schemas(strict)
    for tool, (where, _), problem in zip(strict, schemas, _problems(schemas, syntax, backends), strict=True):
        if problem is not None:
            _check_not_strict(tool, where, problem)
    held = {tool["function"]["name"]: schema for tool, (_, schema) in zip(strict, schemas, strict=True)}
    names = [tool["function"]["name"] for tool in tools]
    forms = [CallForm(name, held.get(name) or _free(tool, syntax)) for name, tool in zip(names, tools, strict=True)]
    return calls_among_text(syntax, forms, writer.special, is_one=choice.is_one)


def _by_name(tools: Sequence[Tool]) -> list[Tool]:
    """The tools, of those with one name the last."""
    return list({tool["function"]["name"]: tool for tool in tools}.values())


def _schemas(tools: Sequence[Tool]) -> list[tuple[str, dict[str, Any]]]:
    """(what errors name, schema of the arguments) of each function."""
    named = [(f"tools {tool['function']['name']}", tool) for tool in _by_name(tools)]
    return [(where, with_types(arguments_schema(where, tool["function"]))) for where, tool in named]


def _problems(
    schemas: Sequence[tuple[str, dict[str, Any]]], syntax: CallSyntax, backends: Sequence[str]
) -> list[str | None]:
    """Why each cannot be followed by the backend that follows most of them; None = it can."""
    found = [[_problem(schema, syntax, backend) for _, schema in schemas] for backend in backends]
    return min(found, key=lambda problems: sum(problem is not None for problem in problems))


def _problem(schema: dict[str, Any], syntax: CallSyntax, backend: str) -> str | None:
    problem = _schema_problem(schema, backend)
    if problem is not None or syntax.parameters is None:
        return problem
    return xml_problem(schema, syntax.parameters)


def _schema_problem(schema: dict[str, Any], backend: str) -> str | None:
    """Why `backend` cannot follow it, whatever format calls are written in."""
    problem = malformed(schema) or find_problem(simplified(schema), capabilities_of(backend))
    return None if problem is None else str(problem)


def _check_followed(schemas: Sequence[tuple[str, dict[str, Any]]], backends: Sequence[str]) -> None:
    """Refuse what a `response_format` of the same schema is refused for."""
    for where, schema in schemas:
        problems = {backend: _schema_problem(schema, backend) for backend in backends}
        if all(problem is not None for problem in problems.values()):
            told = "; ".join(f"{backend}: {problem}" for backend, problem in problems.items())
            raise ValidationError(
                f"no grammar backend supports {where}.function.parameters ({told})",
                hint="leave out the unsupported keyword, and validate it in the client; or use tool_choice auto",
                field=TOOLS_FIELD,
            )


def _check_not_strict(tool: Tool, where: str, problem: str) -> None:
    if tool["function"].get("strict"):
        raise ValidationError(
            f"{where}.function.parameters is not supported, but the function is strict: {problem}",
            hint="leave out the unsupported keyword, or strict", field=TOOLS_FIELD,
        )  # fmt: skip


def _installed(backends: Sequence[str], config: StructuredOutputsConfig) -> list[str]:
    """Those of `backends` that may be used and are there."""
    return [name for name in backends if config.backend in ("auto", name) and is_installed(name)]


def _free(tool: Tool, syntax: CallSyntax) -> Mapping[str, Any]:
    """The schema of a function whose arguments are as the model likes."""
    given = tool["function"].get("parameters")
    if syntax.parameters is None:
        return ANY_ARGUMENTS
    return {**without_problems(given), "required": []} if isinstance(given, dict) else ANY_ARGUMENTS
