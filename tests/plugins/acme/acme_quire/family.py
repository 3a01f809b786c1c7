"""A model's description: read by processes that never load torch."""

from __future__ import annotations

from quire.config.families.llama import Llama


class AcmeFamily(Llama):
    """A Llama whose logits are turned round; config.json is read as a Llama's."""

    quire_contract = 1
    model_class = "acme_quire.model:AcmeForCausalLM"


class NotAFamily:
    """What a mistake in an entry point leads to."""
