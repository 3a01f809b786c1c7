"""Arguments of `LLM`'s methods in the forms that users give them, made into one value for each prompt.

Called by `LLM`. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.core.inputs import TextPrompt, TokensPrompt
from quire.core.request_options import RequestOptions
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.core.tenancy import NO_TENANT, TenantShare
from quire.errors import UnsupportedError, ValidationError

Prompt = str | list[int] | Mapping[str, Any] | TextPrompt | TokensPrompt
Params = SamplingParams | Sequence[SamplingParams] | None
Messages = Sequence[Mapping[str, Any]]
Priority = int | Sequence[int] | None
Tenants = TenantShare | Sequence[TenantShare] | None


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, (str, Mapping, TextPrompt, TokensPrompt)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValidationError(
            f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}",
            hint="pass a string, a list of token ids, or a list of those",
            field="prompts",
        )
    items = list(prompts)
    return [items] if items and all(isinstance(item, int) for item in items) else items


def conversation_list(messages: Any) -> list[Any]:
    """One conversation or many, as a list of conversations."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValidationError(
            f"messages must be a list of messages, not {type(messages).__name__}",
            hint='for example [{"role": "user", "content": "Hello"}]; a plain string goes to generate()',
            field="messages",
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)


def one_each(name: str, given: Any, count: int, kind: type) -> list[Any]:
    """`given`, one value of type `kind` for each of `count` prompts, as a list."""
    expected = "an int" if kind is int else f"a {kind.__name__}"
    if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise ValidationError(
            f"{name} must be {expected}, or a list of them, not {type(given).__name__}",
            hint=f"pass one for all {count} prompts, or a list of {count}",
            field=name,
        )
    if len(given) != count:
        raise ValidationError(
            f"{name} is a list of {len(given)} for {count} prompt{'s' if count != 1 else ''}",
            hint=f"pass one for all, or a list of {count}",
            field=name,
        )
    wrong = next((one for one in given if not isinstance(one, kind)), None)
    if wrong is not None:
        raise ValidationError(f"{name} must hold {kind.__name__} objects, not {type(wrong).__name__}", field=name)
    return list(given)


def priority_list(given: Priority, count: int) -> list[int]:
    """One for each of `count` prompts; an int is that of all."""
    return [given or 0] * count if given is None or isinstance(given, int) else one_each("priority", given, count, int)


def tenant_list(given: Tenants, count: int) -> list[TenantShare]:
    """One for each of `count` prompts."""
    if given is None or isinstance(given, TenantShare):
        return [given or NO_TENANT] * count
    return one_each("tenant", given, count, TenantShare)


def options_list(
    count: int,
    priority: Priority,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    tenant: Tenants = None,
) -> list[RequestOptions]:
    """Options for each of `count` prompts."""
    special = special_tokens_wanted(tokenization_kwargs)
    return [
        RequestOptions(priority=rank, tenant=share, add_special_tokens=special)
        for rank, share in zip(priority_list(priority, count), tenant_list(tenant, count), strict=True)
    ]


def params_list(given: Params, count: int, default: Callable[[], SamplingParams]) -> list[SamplingParams]:
    """One for each of `count` prompts, of which only the final output is of interest."""
    if given is None or isinstance(given, SamplingParams):
        return [_final_only(given or default())] * count
    return [_final_only(one) for one in one_each("sampling_params", given, count, SamplingParams)]


def special_tokens_wanted(tokenization_kwargs: Mapping[str, Any] | None) -> bool:
    """What `tokenization_kwargs` say of special tokens; they can say nothing else."""
    kwargs = dict(tokenization_kwargs or {})
    add_special_tokens = kwargs.pop("add_special_tokens", True)
    if kwargs:
        name = next(iter(kwargs))
        raise UnsupportedError(
            f"tokenization_kwargs[{name!r}] is not supported",
            hint="only add_special_tokens is; prompts are never truncated",
            field="tokenization_kwargs",
        )
    return bool(add_special_tokens)


def _final_only(params: SamplingParams) -> SamplingParams:
    if params.output_kind is RequestOutputKind.FINAL_ONLY:
        return params
    final = params.clone()
    final.output_kind = RequestOutputKind.FINAL_ONLY
    return final
