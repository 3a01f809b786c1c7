"""The forms a prompt can take, checked once and turned into frozen values.

Called by the input processor and the chat front-ends with whatever the user passed; no state.
A prompt is text, token ids, or a conversation (a list of messages that a chat template turns into text).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from quire.errors import UnsupportedError, ValidationError, unknown_name
from quire.utils.checks import check_int_list, check_text, out_of_range, wrong_type

MAX_TOKEN_ID = 2**31 - 1
MAX_PROMPT_CHARS = 64 * 1024 * 1024
MAX_MESSAGES = 16384
MAX_CACHE_SALT_CHARS = 128
CACHE_SALT_FORBIDDEN = "@/\\\0"

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
PROMPT_KEYS_NOT_YET = (
    "prompt_embeds", "multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs",
    "encoder_prompt", "decoder_prompt", "token_type_ids", "prompt_token_offsets", "data", "data_format",
)  # fmt: skip
MAX_ROLE_CHARS = 64
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
TOOL_CALL_KEYS = ("id", "type", "function", "index")
PARTS_NOT_YET = (
    "image_url", "image", "image_pil", "image_embeds", "input_image", "audio_url", "audio", "input_audio",
    "audio_embeds", "video_url", "video", "file", "refusal", "thinking",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt to be tokenized; requests share cached blocks only with requests of the same `cache_salt`.

    `template_id` names the chat template that made it; 0 = none did.
    """

    prompt: str
    cache_salt: str | None = None
    template_id: int = 0


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """A prompt of token ids, at least one, each in [0, 2**31); `prompt` is its text when the caller has it.

    Full blocks of its first `num_shared_tokens` tokens are shared whatever the salt. `template_id` as of `TextPrompt`.
    """

    prompt_token_ids: tuple[int, ...]
    prompt: str | None = None
    cache_salt: str | None = None
    num_shared_tokens: int = 0
    template_id: int = 0


class ChatMessage(TypedDict, total=False):
    """One checked message, as chat templates read it: `content` is text, call arguments are dicts."""

    role: str
    content: str | None
    name: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    reasoning_content: str


def parse_prompt(prompt: Any) -> TextPrompt | TokensPrompt:
    """One prompt from any form a user may pass.

    Args:
        prompt: text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": ids, "prompt": text}`;
            the dict forms may add "cache_salt".

    Raises:
        ValidationError: it is empty, of a wrong type, too long, or has an unknown key.
        UnsupportedError: it has a known key that Quire does not honour yet.
    """
    if isinstance(prompt, (TextPrompt, TokensPrompt)):
        return prompt
    if isinstance(prompt, str):
        return TextPrompt(_prompt_text(prompt))
    if isinstance(prompt, Mapping):
        return _parse_prompt_dict(prompt)
    if getattr(prompt, "ndim", None) == 1 or (isinstance(prompt, Sequence) and not isinstance(prompt, bytes)):
        return TokensPrompt(_prompt_ids(prompt))
    raise wrong_type("prompt", prompt, "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'")


def made_by_template(text: str, template_id: int) -> TextPrompt:
    """The prompt that a chat template made; raises `ValidationError` when it is empty or too long."""
    return TextPrompt(_prompt_text(text), template_id=template_id)


def with_cache_salt(prompt: TextPrompt | TokensPrompt, cache_salt: str) -> TextPrompt | TokensPrompt:
    """The prompt with another salt.

    Raises:
        ValidationError: the salt is empty, too long, or has a character that a salt may not have.
    """
    return replace(prompt, cache_salt=_cache_salt(cache_salt))


def with_token_ids(prompt: TextPrompt, token_ids: Sequence[int]) -> TokensPrompt | TextPrompt:
    """The prompt whose text a tokenizer made `token_ids` of; as it is when there are none."""
    if not token_ids:
        return prompt
    return TokensPrompt(tuple(token_ids), prompt.prompt, cache_salt=prompt.cache_salt, template_id=prompt.template_id)


def parse_messages(messages: Any) -> list[ChatMessage]:
    """The messages of one conversation, checked and in the form chat templates read.

    A content of several text parts becomes one text, parts separated by a newline; arguments of tool calls
    given as JSON text become dicts.

    Raises:
        ValidationError: no messages, too many, a wrong type, an unknown key or part type.
        UnsupportedError: a content part that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise wrong_type("messages", messages, "a list of {'role', 'content'} dicts")
    if not messages:
        raise ValidationError("messages is empty", hint="pass at least one message", field="messages")
    if len(messages) > MAX_MESSAGES:
        raise out_of_range("len(messages)", len(messages), f"at most {MAX_MESSAGES}")
    return [_parse_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _parse_prompt_dict(prompt: Mapping[str, Any]) -> TextPrompt | TokensPrompt:
    for key, value in prompt.items():
        if key in PROMPT_KEYS_NOT_YET:
            if value is None:
                continue
            raise UnsupportedError(
                f"prompt key {key!r} is valid for vLLM, but Quire does not implement it yet",
                hint="use 'prompt' or 'prompt_token_ids'",
                field=key,
            )
        if key not in PROMPT_KEYS:
            raise unknown_name("prompt key", str(key), PROMPT_KEYS, ValidationError)
    salt = _cache_salt(prompt.get("cache_salt"))
    text = prompt.get("prompt")
    if prompt.get("prompt_token_ids") is not None:
        checked = None if text is None else check_text("prompt", text)
        return TokensPrompt(_prompt_ids(prompt["prompt_token_ids"]), checked, salt)
    if text is None:
        raise ValidationError(
            "prompt has neither 'prompt' nor 'prompt_token_ids'", hint="give one of the two", field="prompt"
        )
    return TextPrompt(_prompt_text(text), salt)


def _prompt_text(value: Any) -> str:
    text = check_text("prompt", value)
    if not text:
        raise ValidationError("prompt is empty", hint="pass at least one character", field="prompt")
    if len(text) > MAX_PROMPT_CHARS:
        raise out_of_range("len(prompt)", len(text), f"at most {MAX_PROMPT_CHARS} characters")
    return text


def _prompt_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], (str, Mapping)):
        raise ValidationError(
            f"prompt is a list of {type(value[0]).__name__}, not of token ids",
            hint="pass the prompts one by one, or a conversation to chat()", field="prompt",
        )  # fmt: skip
    ids = tuple(check_int_list("prompt_token_ids", value, 0, MAX_TOKEN_ID))
    if not ids:
        raise ValidationError("prompt_token_ids is empty", hint="pass at least one id", field="prompt_token_ids")
    return ids


def _cache_salt(value: Any) -> str | None:
    if value is None:
        return None
    salt = check_text("cache_salt", value)
    if not 1 <= len(salt) <= MAX_CACHE_SALT_CHARS or any(char in CACHE_SALT_FORBIDDEN for char in salt):
        raise out_of_range("cache_salt", salt, f"1 to {MAX_CACHE_SALT_CHARS} characters without @ / \\ and NUL")
    return salt


def _parse_message(where: str, message: Any) -> ChatMessage:
    if not isinstance(message, Mapping):
        raise wrong_type(where, message, "a dict with 'role' and 'content'")
    for key in message:
        if key not in MESSAGE_KEYS:
            raise unknown_name(f"key of {where}", str(key), MESSAGE_KEYS, ValidationError, field=where)
    parsed = ChatMessage(role=_role(where, message), content=_content(f"{where}.content", message.get("content")))
    if message.get("name") is not None:
        parsed["name"] = check_text(f"{where}.name", message["name"])
    if message.get("tool_call_id") is not None:
        parsed["tool_call_id"] = check_text(f"{where}.tool_call_id", message["tool_call_id"])
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        parsed["reasoning_content"] = check_text(f"{where}.reasoning_content", reasoning)
    if message.get("tool_calls"):
        parsed["tool_calls"] = _tool_calls(f"{where}.tool_calls", message["tool_calls"])
    is_answer = parsed["role"] == "assistant"
    if is_answer and "tool_calls" not in parsed:  # a turn that was cut, or only thought, may have none
        parsed["content"] = parsed["content"] or ""
    if parsed["content"] is None and not is_answer:
        raise ValidationError(
            f"{where} has no content", hint="set 'content' to a string (it may be empty)", field=f"{where}.content"
        )
    return parsed


def _role(where: str, message: Mapping[str, Any]) -> str:
    """Any name: templates may know roles of their own."""
    role = check_text(f"{where}.role", message.get("role"))
    if not 1 <= len(role) <= MAX_ROLE_CHARS or not role.isprintable():
        raise out_of_range(f"{where}.role", role, f"a name of 1 to {MAX_ROLE_CHARS} characters, such as user")
    return role


def _content(where: str, content: Any) -> str | None:
    if content is None:
        return None
    if isinstance(content, str):
        text = content
    elif isinstance(content, Sequence) and not isinstance(content, bytes):
        text = "\n".join(_part_text(f"{where}[{index}]", part) for index, part in enumerate(content))
    else:
        raise wrong_type(where, content, "a string or a list of {'type': 'text', 'text': ...} parts")
    if len(text) > MAX_PROMPT_CHARS:
        raise out_of_range(f"len({where})", len(text), f"at most {MAX_PROMPT_CHARS} characters")
    return text


def _part_text(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise wrong_type(where, part, "a {'type': 'text', 'text': ...} part")
    kind = part.get("type", "text" if "text" in part else None)
    if kind in PARTS_NOT_YET:
        raise UnsupportedError(
            f"{where}: content part {kind!r} is not supported yet", hint="send text parts only", field=where
        )
    if kind not in ("text", "input_text", "output_text"):
        raise unknown_name(f"part type in {where}:", str(kind), ("text",), ValidationError, field=f"{where}.type")
    return check_text(f"{where}.text", part.get("text"))


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, (str, bytes)):
        raise wrong_type(where, calls, "a list of tool calls")
    return [_tool_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise wrong_type(where, call, "{'type': 'function', 'function': {'name', 'arguments'}}")
    for key in call:
        if key not in TOOL_CALL_KEYS:
            raise unknown_name(f"key of {where}", str(key), TOOL_CALL_KEYS, ValidationError, field=where)
    function = call["function"]
    checked = {
        "name": check_text(f"{where}.function.name", function.get("name")),
        "arguments": _arguments(f"{where}.function.arguments", function.get("arguments")),
    }
    rest = {key: call[key] for key in ("id", "index") if key in call}
    return {**rest, "type": "function", "function": checked}


def _arguments(where: str, arguments: Any) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValidationError(
                f"{where} is not JSON: {error}", hint="pass a dict or a string with a JSON object", field=where
            ) from None
    if not isinstance(arguments, Mapping):
        raise wrong_type(where, arguments, "a dict or a string with a JSON object")
    return dict(arguments)
