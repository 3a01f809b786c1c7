"""Every exception Quire raises on purpose, drawn as one tree.

Called from all layers. Two branches: the caller was wrong (`QuireClientError`, also a `ValueError`, maps
to HTTP 4xx) or the environment cannot do it (`QuireServerError`, maps to 5xx). Broken invariants of our own
are `assert`s. A message says what was given, what is allowed and what to do (the hint).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class QuireError(Exception):
    """Root of the tree.

    Args:
        message: what was given and what is allowed.
        hint: what to do about it; shown on a line of its own.
        field: the parameter, flag, tensor or file the error is about.
    """

    def __init__(self, message: str, *, hint: str | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class QuireClientError(QuireError, ValueError):
    """The caller was wrong; repeating the same call cannot succeed."""


class ValidationError(QuireClientError):
    """A request's parameter or prompt is out of its allowed range."""


class ContextLengthError(ValidationError):
    """A prompt leaves no room for an answer. Its first sentence is that by which OpenAI's and vLLM's clients know it.

    Args:
        max_model_len: of prompt and answer together, in tokens.
        size: of the prompt, in `unit`.
        what: the prompt, as the caller calls it.
        limit: of the prompt, in `unit`; None = unknown.
        field: where it was given.
    """

    def __init__(
        self,
        max_model_len: int,
        size: int,
        unit: str = "tokens",
        *,
        what: str = "the prompt has",
        limit: int | None = None,
        field: str = "prompt",
    ) -> None:
        self.size, self.unit = size, unit
        self.limit = max_model_len - 1 if limit is None else limit
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, {what} {size} {unit}",
            hint=f"shorten it to at most {self.limit} {unit}, or raise max_model_len", field=field,
        )  # fmt: skip


class UnsupportedError(QuireClientError):
    """A known parameter or feature that Quire does not honour (yet)."""


class ConfigError(QuireClientError):
    """A setting is unknown, malformed, or contradicts another."""


class ModelError(QuireClientError):
    """A model directory is incomplete, malformed, hostile, or of an unknown kind."""


class WeightsError(ModelError):
    """A weight file is malformed, or its tensors are not those the model needs."""


class HubUnreachableError(ModelError):
    """The hub cannot be reached, or does not answer; the same call may succeed later."""


class TokenizerError(ModelError):
    """The tokenizer is missing or unusable."""


class ChatTemplateError(QuireClientError):
    """The chat template is missing, unsafe, too expensive, or refused the messages."""


class ShapeError(QuireClientError):
    """A tensor's size, dtype, stride or device differs from the promised one."""


class QuireServerError(QuireError, RuntimeError):
    """The environment cannot do what was asked."""


class NotEnoughMemoryError(QuireServerError):
    """The memory that is left does not hold what the settings ask for."""


class NotEnoughDiskError(QuireServerError):
    """The disk has too little room for a download."""


class NativeLibraryError(QuireServerError):
    """The C++ kernels are not built, or none of their tiers runs here."""


class EngineDeadError(QuireServerError):
    """The engine stopped and cannot serve this call."""


class CommunicationError(EngineDeadError):
    """A process of the group that computes a model has ended, or did not come to a collective; says which."""


class EngineRestartingError(EngineDeadError):
    """The engine core is being replaced, or is about to be; requests wait, and those that ran go on."""


class EngineSleepingError(EngineDeadError):
    """The engine gave back its memory, and is to be woken up."""


class EngineGenerateError(QuireServerError):
    """One request failed inside the engine; others go on."""


class QueueTimeoutError(EngineGenerateError):
    """One request waited longer than it may without ever running."""


class MessageError(QuireServerError):
    """A message between the engine's processes is malformed."""


MAX_NAME_CHARS = 100
MIN_LIKENESS = 0.74  # of `difflib`: "prot" is like "port", "task" is not like "tags"
MIN_PREFIX_CHARS = 4


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """The valid name that `name` is likely to be a slip of, or None; an overlong name is near to nothing.

    A name that asks for the opposite ("disable_x" for "enable_x") is not near, however it is spelt.
    """
    if len(name) > MAX_NAME_CHARS:
        return None
    bare = {one.lstrip("-").casefold(): one for one in valid if _is_negative(one) == _is_negative(name)}
    text = name.lstrip("-").casefold()
    longer = [one for one in bare if len(text) >= MIN_PREFIX_CHARS and one.startswith(text)]
    found = difflib.get_close_matches(text, bare, n=1, cutoff=MIN_LIKENESS)
    if found or not longer:
        return bare[found[0]] if found else None
    return bare[min(longer, key=len)]


def unknown_name(
    kind: str,
    name: str,
    valid: Iterable[str],
    error: type[QuireError] = ConfigError,
    *,
    elsewhere: Mapping[str, str] | None = None,
    otherwise: str | None = None,
    field: str | None = None,
) -> QuireError:
    """An error of class `error` for an unknown `kind` (as in "flag"), with one hint.

    Args:
        valid: names of this kind; the hint is the one nearest, or where none is near all of them.
        elsewhere: names of other programs -> the hint.
        otherwise: the hint where none is near, in place of all names.
        field: that the error is about; None = the name, which is a field's then.
    """
    options = sorted(valid)
    hint = (elsewhere or {}).get(name)
    if hint is None:
        close = nearest(name, options)
        hint = f"did you mean {close!r}?" if close else otherwise or f"valid: {', '.join(options)}"
    shown = name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}..."
    return error(f"unknown {kind} {shown!r}", hint=hint, field=field or shown)


def require_unset(**arguments: object) -> None:
    """Refuse arguments that were given and stand for something Quire does not do yet, by name.

    Raises:
        UnsupportedError: one of them is neither None nor empty.
    """
    for name, value in arguments.items():
        if value:
            raise UnsupportedError(f"{name} is not supported yet", hint=f"leave out {name}", field=name)


def _is_negative(name: str) -> bool:
    return not {"no", "disable"}.isdisjoint(name.replace("_", "-").split("-"))
