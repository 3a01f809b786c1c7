"""ChatTemplate: messages to the prompt text a model was trained on.

Found and compiled by `load_chat_template` (engine factory), rendered by `LLM.chat` and the servers. Owns one
sandboxed environment; a template may come from anywhere, so it can compute texts and nothing else.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from quire.errors import ChatTemplateError
from quire.logger import get_logger
from quire.tokenization.files import read_text
from quire.tokenization.messages import cut_at_mark, mark_last_message, plain_value, template_messages, template_tools
from quire.tokenization.template_budget import Budget, OverBudgetError, TemplateLimits
from quire.tokenization.template_sandbox import TemplateEnvironment
from quire.tokenization.tokenizer import Tokenizer

logger = get_logger(__name__)

TEMPLATE_NAME = "<template>"
COMPILE_EVENTS = 50_000_000
KEPT_CODES = 16
PROBE_LIMITS = TemplateLimits(max_events=300_000, max_cpu_s=1.5)
TEMPLATE_BUGS = (OverBudgetError, RecursionError, MemoryError)
RESERVED = frozenset(("messages", "tools", "documents", "add_generation_prompt"))
CONTENT_FORMATS = ("auto", "string", "openai")


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja, in the dialect of Hugging Face's tokenizer_config.json.
        special_tokens: role -> text, visible to the template ("bos_token", ...).
        limits: of each rendering.

    Raises:
        ChatTemplateError: the source is too long or is not valid Jinja.

    Attributes:
        id: the same for the same source, and not 0.
        with_tools: the template for conversations with tools, where the model has one of its own; else this one.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, limits: TemplateLimits | None = None
    ) -> None:
        self.source = source
        self.id = int.from_bytes(hashlib.sha256(source.encode()).digest()[:7], "little") + 1
        self._limits = limits or TemplateLimits()
        self._special_tokens = dict(special_tokens or {})
        self._lock = threading.Lock()
        self._environment = TemplateEnvironment(Budget(self._limits, TEMPLATE_NAME))
        self._template, self._loops_over_content = self._compile(source)
        self.with_tools: ChatTemplate = self

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        content_format: str = "auto",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: each with "role" and "content" (text, or a list of text parts).
            tools: function descriptions, as templates expect them.
            documents: texts to answer from, for templates that know them.
            add_generation_prompt: end with what begins the model's turn.
            continue_final_message: leave the last message open, to be continued by the model.
            content_format: "string" joins text parts; "openai" gives every content as parts; "auto" looks at the
                template.
            template_kwargs: further variables; the names this method sets itself are refused.

        Raises:
            ValidationError: the messages are malformed.
            ChatTemplateError: the template refuses them, or does too much work.
        """
        if add_generation_prompt and continue_final_message:
            raise ChatTemplateError(
                "add_generation_prompt and continue_final_message exclude each other",
                hint="set add_generation_prompt=False to continue the last message",
                field="continue_final_message",
            )
        plain = template_messages(messages, as_parts=self._wants_parts(content_format))
        if continue_final_message:
            plain = mark_last_message(plain)
        variables = self._variables(template_kwargs)
        variables |= {"messages": plain, "tools": template_tools(tools)}
        variables["documents"] = None if documents is None else plain_value(documents, "documents")
        variables["add_generation_prompt"] = add_generation_prompt
        text = self._render(variables)
        return cut_at_mark(text) if continue_final_message else text

    def copy(self) -> ChatTemplate:
        """The same template with a lock of its own: rendering it waits for no other thread."""
        return ChatTemplate(self.source, self._special_tokens, self._limits)

    def probe(self) -> None:
        """Render a short conversation, to learn of a hostile template before anything costly is started.

        Raises:
            ChatTemplateError: the template does too much work or reaches for what it must not have. That it
                refuses this particular conversation is no error.
        """
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}] * 2
        variables = self._variables(None) | {"messages": messages[:3], "tools": None, "documents": None}
        try:
            self._run(variables | {"add_generation_prompt": True}, PROBE_LIMITS)
        except TEMPLATE_BUGS as error:
            raise _too_expensive(error) from None
        except SecurityError as error:
            raise ChatTemplateError(
                f"the chat template is not safe: {error}",
                hint="pass a template that you trust: chat_template=...",
                field="chat_template",
            ) from error
        except Exception as error:  # the template refused this conversation; another may suit it
            logger.debug("the chat template did not render a short conversation: %s", error)

    def _variables(self, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        kwargs = dict(template_kwargs or {})
        taken = sorted(RESERVED & kwargs.keys())
        if taken:
            raise ChatTemplateError(
                f"chat_template_kwargs cannot set {', '.join(taken)}",
                hint="pass it as a separate argument",
                field="chat_template_kwargs",
            )
        return {**self._special_tokens, **plain_value(kwargs, "chat_template_kwargs")}

    def _wants_parts(self, content_format: str) -> bool:
        if content_format not in CONTENT_FORMATS:
            raise ChatTemplateError(
                f"chat_template_content_format {content_format!r} is unknown",
                hint=f"use one of {', '.join(CONTENT_FORMATS)}",
                field="chat_template_content_format",
            )
        return content_format == "openai" or (content_format == "auto" and self._loops_over_content)

    def _render(self, variables: dict[str, Any]) -> str:
        try:
            return self._run(variables, self._limits)
        except ChatTemplateError:
            raise
        except TEMPLATE_BUGS as error:
            raise _too_expensive(error) from None
        except Exception as error:  # a template can fail in any way; all of them mean the same to the caller
            raise ChatTemplateError(
                f"the chat template failed: {type(error).__name__}: {error}",
                hint="check the roles and fields of the messages against what the model's template expects",
                field="messages",
            ) from error

    def _run(self, variables: dict[str, Any], limits: TemplateLimits) -> str:
        with self._lock:
            budget = self._environment.budget = Budget(limits, TEMPLATE_NAME)
            budget.weigh(variables)
            with budget.tracing():
                return self._template.render(variables)

    def _compile(self, source: str) -> tuple[jinja2.Template, bool]:
        if len(source) > self._limits.max_source_chars:
            raise ChatTemplateError(
                f"the chat template has {len(source)} characters, at most {self._limits.max_source_chars} are allowed",
                hint="use a shorter template",
                field="chat_template",
            )
        try:
            code, loops_over_content = _compiled(source, self._limits.max_cpu_s)
        except TEMPLATE_BUGS as error:
            raise _too_expensive(error) from None
        except (jinja2.TemplateError, SyntaxError, ValueError) as error:
            where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ChatTemplateError(
                f"the chat template does not compile: {error}{where}",
                hint="it must be Jinja with the filters and methods that Hugging Face chat templates use",
                field="chat_template",
            ) from error
        environment = self._environment
        return jinja2.Template.from_code(environment, code, environment.make_globals(None)), loops_over_content


@lru_cache(maxsize=KEPT_CODES)
def _compiled(source: str, max_cpu_s: float) -> tuple[CodeType, bool]:
    """The code of a template, which is the same in every environment, and whether it goes through parts of contents."""
    budget = Budget(TemplateLimits(max_events=COMPILE_EVENTS, max_cpu_s=max_cpu_s), TEMPLATE_NAME)
    environment = TemplateEnvironment(budget)
    with budget.tracing():
        tree = environment.parse(source)
        loops_over_content = any(map(_reads_content, tree.find_all(nodes.For)))
        return environment.compile(tree), loops_over_content


def load_chat_template(
    tokenizer: Tokenizer, template: str | None = None, *, limits: TemplateLimits | None = None
) -> ChatTemplate | None:
    """The chat template to use; None when there is none.

    Args:
        tokenizer: its directory's chat_template.jinja, then the `chat_template` of its tokenizer_config.json.
        template: the user's choice, which goes first: a path, or Jinja itself.
        limits: of each rendering.

    Raises:
        ChatTemplateError: the path does not exist, or the template is malformed.
    """
    special_tokens = tokenizer.special_tokens
    if template is not None:
        return ChatTemplate(read_template_argument(template), special_tokens, limits)
    source, tool_source = find_template(tokenizer), find_template(tokenizer, with_tools=True)
    if tool_source is None:
        return None
    with_tools = ChatTemplate(tool_source, special_tokens, limits)
    if source is None or source == tool_source:
        return with_tools
    found = ChatTemplate(source, special_tokens, limits)
    found.with_tools = with_tools
    return found


def read_template_argument(template: str) -> str:
    """The source that a user's `chat_template` means: a path when it has no braces, else Jinja itself."""
    if "{" in template or "\n" in template:
        return template
    path = Path(template)
    if not path.is_file():
        raise ChatTemplateError(
            f"chat_template {template!r} is neither an existing file nor Jinja text",
            hint="give the path of a .jinja file, or the template itself",
            field="chat_template",
        )
    return read_text(path, TemplateLimits().max_source_chars * 4)


def find_template(tokenizer: Tokenizer, with_tools: bool = False) -> str | None:
    """The source of the template that comes with `tokenizer`; None when there is none.

    Args:
        with_tools: prefer a template named "tool_use" over "default" when the model has several.
    """
    if tokenizer.directory is not None and (tokenizer.directory / "chat_template.jinja").exists():
        return read_text(tokenizer.directory / "chat_template.jinja", TemplateLimits().max_source_chars * 4)
    entry = tokenizer.config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = (named.get("tool_use") if with_tools else None) or named.get("default")
    if entry is not None and not isinstance(entry, str):
        raise ChatTemplateError(
            f"chat_template in tokenizer_config.json is a {type(entry).__name__}, a string or a list of "
            "named templates is needed",
            hint="pass a template of your own: chat_template=...",
            field="chat_template",
        )
    return entry


def _reads_content(loop: nodes.For) -> bool:
    """True for a loop over a message's content, as in `for part in message.content`."""
    target: nodes.Node = loop.iter
    while isinstance(target, nodes.Filter) and target.node is not None:
        target = target.node
    if isinstance(target, nodes.Getattr):
        return target.attr == "content"
    return isinstance(target, nodes.Getitem) and isinstance(target.arg, nodes.Const) and target.arg.value == "content"


def _too_expensive(error: BaseException) -> ChatTemplateError:
    reason = error if isinstance(error, OverBudgetError) else "nests too deeply or needs too much memory"
    return ChatTemplateError(
        f"the chat template {reason}", hint="use a simpler template or a shorter conversation", field="chat_template"
    )
