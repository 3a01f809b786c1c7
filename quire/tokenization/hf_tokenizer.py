"""HFTokenizer: a vocabulary with the methods of Hugging Face's tokenizers, as users know them.

Made by `LLM.get_tokenizer` and by who loads a tokenizer without an engine. Its results are those of `transformers` for
the same files; arguments that would pad, cut or make tensors are refused by name. No state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from quire.errors import ChatTemplateError, ValidationError, require_unset
from quire.tokenization.chat_template import ChatTemplate, load_chat_template
from quire.tokenization.tokenizer import ROLES, Tokenizer


class Encoding(dict[str, Any]):
    """Lists by name ("input_ids", "attention_mask"), which are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"an encoding has no {name!r}, only {', '.join(self)}") from None


class HFTokenizer:
    """The interface of a Hugging Face tokenizer over Quire's.

    Args:
        tokenizer: the vocabulary.
        template: of chats; None when the model has none.
    """

    is_fast = True

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    # --- texts to ids and back ---

    def encode(
        self, text: str, add_special_tokens: bool = True, *, padding: Any = False, truncation: Any = False,
        return_tensors: Any = None,
    ) -> list[int]:  # fmt: skip
        """Token ids of `text`.

        Args:
            add_special_tokens: write what the vocabulary puts around a text.
            padding, truncation, return_tensors: refused.

        Raises:
            ValidationError: `text` is not a string or holds lone surrogates.
        """
        require_unset(padding=padding, truncation=truncation, return_tensors=return_tensors)
        return self._tokenizer.encode(text, add_special_tokens)

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, *, padding: Any = False,
        truncation: Any = False, return_tensors: Any = None, return_attention_mask: bool = True,
    ) -> Encoding:  # fmt: skip
        """Token ids and attention mask of a text, or lists of them for several; errors as `encode`."""
        require_unset(padding=padding, truncation=truncation, return_tensors=return_tensors)
        if isinstance(text, str):
            return _encoding(self._tokenizer.encode(text, add_special_tokens), return_attention_mask)
        return _encoding(self._tokenizer.encode_batch(text, add_special_tokens), return_attention_mask)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str | list[str]:
        """Text of one id, of several, or a text for each of several lists."""
        ids = _plain(token_ids)
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            return self.batch_decode(ids, skip_special_tokens)
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **_: Any) -> list[str]:
        """A text for each of several lists of ids, or for each id."""
        return [self._tokenizer.decode(_plain(one), skip_special_tokens) for one in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """The vocabulary's entries that make up `text`."""
        return self._tokenizer.convert_ids_to_tokens(self._tokenizer.encode(text, add_special_tokens))

    def token_text(self, token_id: int) -> str:
        """What one token looks like inside a text: its leading space kept, special tokens shown."""
        return self._tokenizer.token_text(token_id)

    # --- the vocabulary ---

    @property
    def vocab_size(self) -> int:
        """Entries without added tokens; `len()` counts all."""
        return self._tokenizer.base_vocab_size

    def __len__(self) -> int:
        return len(self.get_vocab())

    def get_vocab(self) -> dict[str, int]:
        """Entry -> id, added tokens included."""
        return self._tokenizer.vocabulary()

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> str | list[str]:
        """The entry of an id, or those of several."""
        plain = _plain(ids)
        if isinstance(plain, int):
            return self._tokenizer.convert_ids_to_tokens([plain])[0]
        hidden = frozenset(self.all_special_ids if skip_special_tokens else ())
        return self._tokenizer.convert_ids_to_tokens(one for one in plain if one not in hidden)

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int | None] | None:
        """The id of an entry, or those of several; the unknown token's, if there is one, for what is no entry."""
        single = isinstance(tokens, str)
        names = cast("list[str]", [tokens] if single else list(tokens))
        unknown = self.unk_token_id
        ids = [unknown if one is None else one for one in self._tokenizer.convert_tokens_to_ids(names)]
        return ids[0] if single else ids

    # --- special tokens ---

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Role ("eos_token") -> text."""
        return {role: text for role, text in self._tokenizer.special_tokens.items() if role in ROLES}

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of special tokens that have a role, each once."""
        return list(dict.fromkeys(self._tokenizer.special_tokens.values()))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of `all_special_tokens`."""
        return [one for one in self._tokenizer.convert_tokens_to_ids(self.all_special_tokens) if one is not None]

    def __getattr__(self, name: str) -> Any:
        """The text or id of a role: `eos_token`, `pad_token_id`, ...; None when the vocabulary has none."""
        role = name.removesuffix("_id")
        if role not in ROLES:
            raise AttributeError(f"this tokenizer has no {name!r}; see quire/tokenization/hf_tokenizer.py")
        text = self._tokenizer.special_tokens.get(role)
        if text is None or role == name:
            return text
        return self._tokenizer.convert_tokens_to_ids([text])[0]

    # --- chats ---

    @property
    def chat_template(self) -> str | None:
        """Source of the model's template."""
        return None if self._template is None else self._template.source

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        *,
        padding: Any = False,
        truncation: Any = False,
        return_tensors: Any = None,
        return_dict: bool = True,
        **template_kwargs: Any,
    ) -> Any:
        """The prompt of one conversation, or a list of prompts for several.

        Args:
            chat_template: a path, or Jinja itself, in place of the model's.
            tokenize: ids, not text.
            return_dict: with ids, an `Encoding`; else lists.
            template_kwargs: further variables of the template.

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        require_unset(padding=padding, truncation=truncation, return_tensors=return_tensors)
        template = self._chosen(chat_template, with_tools=bool(tools))
        single = not conversation or isinstance(conversation[0], Mapping)
        texts = [
            template.render(
                cast("Sequence[Mapping[str, Any]]", one), tools=tools, documents=documents,
                add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
                template_kwargs=template_kwargs,
            )
            for one in ([conversation] if single else conversation)
        ]  # fmt: skip
        if not tokenize:
            return texts[0] if single else texts
        encoding = self(texts[0] if single else texts, add_special_tokens=False)
        return encoding if return_dict else encoding["input_ids"]

    def _chosen(self, chat_template: str | None, *, with_tools: bool) -> ChatTemplate:
        template = self._template
        if chat_template is not None:
            template = load_chat_template(self._tokenizer, chat_template)
        if template is None:
            raise ChatTemplateError(
                "this model has no chat template", hint="pass one: chat_template=...", field="chat_template"
            )
        return template.with_tools if with_tools else template


def _encoding(ids: list[Any], with_mask: bool) -> Encoding:
    found = Encoding(input_ids=ids)
    if with_mask:
        nested = bool(ids) and isinstance(ids[0], list)
        found["attention_mask"] = [[1] * len(one) for one in ids] if nested else [1] * len(ids)
    return found


def _plain(ids: Any) -> Any:
    """Ids from numpy or torch as Python's own."""
    plain = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(plain, (int, list)):
        return plain
    if isinstance(plain, Iterable) and not isinstance(plain, (str, bytes)):
        return list(plain)
    raise ValidationError(f"token ids must be an int or a list of ints, not {type(ids).__name__}", field="token_ids")
