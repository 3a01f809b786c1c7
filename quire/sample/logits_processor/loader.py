"""Custom logits processors by class or by "module:Class", named by the engine's owner (never by a request)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, EngineGenerateError, QuireClientError, ValidationError
from quire.sample.logits_processor.interface import LogitsProcessor, ProcessorKind

ProcessorSource = str | type[ProcessorKind]


def load_processors(sources: Sequence[ProcessorSource]) -> list[type[ProcessorKind]]:
    """The processor classes, in the order given.

    Raises:
        ConfigError: a name has not the form "module:Class", cannot be imported, or is no `LogitsProcessor`.
    """
    return [_load(source) if isinstance(source, str) else _checked(source, repr(source)) for source in sources]


def validate_params(classes: Sequence[type[ProcessorKind]], params: SamplingParams) -> None:
    """Let every processor refuse `params`; raises the first one's error, a plain ValueError as `ValidationError`."""
    for processor in classes:
        try:
            processor.validate_params(params)
        except QuireClientError:
            raise
        except ValueError as error:
            raise ValidationError(f"{processor.__qualname__}: {error}", field="extra_args") from error


def processor_failure(processor: LogitsProcessor, method: str, error: Exception) -> EngineGenerateError:
    """The error of a request whose processor raised."""
    name = processor.source.__qualname__
    return EngineGenerateError(
        f"logits processor {name}.{method} raised {type(error).__name__}: {error}",
        hint=f"fix {processor.source.__module__}:{name}, or start the engine without it",
        field="logits_processors",
    )


def _load(name: str) -> type[ProcessorKind]:
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError(
            f"logits processor {name!r} is malformed", hint="write 'module:Class'", field="logits_processors"
        )
    try:
        found = vars(importlib.import_module(module_name))[class_name]
    except ImportError as error:
        raise ConfigError(
            f"logits processor {name!r}: cannot import {module_name!r}: {error}",
            hint="check the module's name and that it is installed",
            field="logits_processors",
        ) from error
    except KeyError:
        raise ConfigError(
            f"logits processor {name!r}: module {module_name!r} has no {class_name!r}",
            hint="check the class name",
            field="logits_processors",
        ) from None
    return _checked(found, repr(name))


def _checked(found: object, name: str) -> type[ProcessorKind]:
    if isinstance(found, type) and issubclass(found, ProcessorKind):
        return found
    raise ConfigError(
        f"logits processor {name} is not a LogitsProcessor class",
        hint="derive it from quire.sample.logits_processor.LogitsProcessor",
        field="logits_processors",
    )
