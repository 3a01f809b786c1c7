"""Rules that change logits: the interface, and the loader of custom ones."""

from quire.sample.logits_processor.interface import LogitsProcessor, ProcessorKind, RowRequest
from quire.sample.logits_processor.loader import ProcessorSource, load_processors, processor_failure, validate_params

__all__ = [
    "LogitsProcessor",
    "ProcessorKind",
    "ProcessorSource",
    "RowRequest",
    "load_processors",
    "processor_failure",
    "validate_params",
]
