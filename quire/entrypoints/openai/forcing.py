"""Calls that an answer must have, as the form of the answer: from a request's tools to `StructuredOutputsParams`.

Called when a chat is read. Pure functions. A schema that no grammar library honours is an error for a strict function;
for others its arguments are any object, and a warning says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.entrypoints.openai.protocol.tools import CHOICE_FIELD, Tool, ToolChoice
from quire.errors import UnsupportedError, ValidationError
from quire.parsers.call_syntax import CallSyntax
from quire.parsers.forced import ANY_ARGUMENTS, CallForm, arguments_schema, forced_calls
from quire.parsers.xml_arguments import without_problems, xml_problem
from quire.structured_output.registry import is_installed
from quire.structured_output.schema_keywords import find_problem, malformed

BACKENDS = ("xgrammar", "guidance")
"""Grammar libraries that know calls, in the order in which they are asked."""


def forced_form(
    choice: ToolChoice,
    syntax: CallSyntax | None,
    special: Mapping[str, int],
    config: StructuredOutputsConfig,
    warnings: list[str],
) -> StructuredOutputsParams:
    """The form of an answer that is calls and nothing else.

    Args:
        choice: at least one tool.
        syntax: how the model writes calls; None = its format cannot be forced.
        special: text -> id of the vocabulary's control tokens.
        warnings: gets a line for each schema that is not followed.

    Raises:
        UnsupportedError: the format cannot be forced.
        ValidationError: a strict function's schema cannot be followed.
    """
    if syntax is None:
        raise UnsupportedError(
            "tool_choice: calls cannot be forced in the format that this server reads",
            hint="use tool_choice auto; or start the server with --tool-call-parser deepseek_v3, granite, hermes, "
            "llama3_json, mistral, openai, qwen3_coder, or pattern with `call` in its format",
            field=CHOICE_FIELD,
        )
    forms = call_forms(choice.tools, syntax, config, warnings)
    tag = forced_calls(syntax, forms, special, is_one=choice.is_one)
    return StructuredOutputsParams(structural_tag=tag, source=CHOICE_FIELD)


def call_forms(
    tools: Sequence[Tool], syntax: CallSyntax, config: StructuredOutputsConfig, warnings: list[str]
) -> list[CallForm]:
    """Each function with the schema that its arguments can be held to.

    Raises:
        ValidationError: as `forced_form`.
    """
    asked = {
        tool["function"]["name"]: (
            f"tools[{index}]",
            tool["function"],
            arguments_schema(f"tools[{index}]", tool["function"]),
        )
        for index, tool in enumerate(tools)
    }
    candidates = [name for name in BACKENDS if is_installed(name)] if config.backend == "auto" else [config.backend]
    problems = {
        backend: {name: _problem(schema, syntax, backend) for name, (_, _, schema) in asked.items()}
        for backend in candidates or BACKENDS
    }
    best = min(problems.values(), key=lambda found: sum(problem is not None for problem in found.values()))
    forms = []
    for name, (where, function, schema) in asked.items():
        problem = best[name]
        if problem is not None and function.get("strict"):
            raise ValidationError(
                f"{where}.function.parameters cannot be followed, and the function is strict: {problem}",
                hint="leave out what is named, or strict", field="tools",
            )  # fmt: skip
        if problem is not None:
            warnings.append(f"{where}.function.parameters: arguments may go against the schema ({problem})")
            schema = without_problems(schema) if syntax.has_parameters else ANY_ARGUMENTS
        forms.append(CallForm(name, schema))
    return forms


def _problem(schema: dict[str, Any], syntax: CallSyntax, backend: str) -> str | None:
    problem = malformed(schema) or find_problem(schema, backend)
    if problem is not None:
        return str(problem)
    return xml_problem(schema) if syntax.has_parameters else None
