"""What an engine is made of. Built by `engine.factory`, taken apart by the front-ends; a value."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import QuireConfig
from quire.engine.core_client.base import EngineCoreClient
from quire.engine.generation_defaults import GenerationDefaults
from quire.engine.input_processor import InputProcessor
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """The parts of one engine.

    Attributes:
        config: resolved.
        client: the way to the engine core.
        input_processor: validates and tokenizes.
        tokenizer: None with skip_tokenizer_init.
        chat_template: the model's or the user's; None when there is none.
        defaults: the model's own settings for generation.
    """

    config: QuireConfig
    client: EngineCoreClient
    input_processor: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
