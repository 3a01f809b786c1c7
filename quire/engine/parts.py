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
class FrontEndParts:
    """What turns requests into messages and steps into text.

    Attributes:
        config: resolved.
        input_processor: validates and tokenizes.
        tokenizer: None with skip_tokenizer_init.
        chat_template: the model's or the user's; None when there is none.
        defaults: the model's own settings for generation.
    """

    config: QuireConfig
    input_processor: InputProcessor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts(FrontEndParts):
    """The parts of an engine that its caller steps.

    Attributes:
        client: the way to the engine core.
    """

    client: EngineCoreClient
