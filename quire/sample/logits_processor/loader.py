"""Custom logits processors: a class, "module:Class" or a plugin's name, given by the engine's owner, not a request."""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, EngineGenerateError, QuireClientError, ValidationError
from quire.plugins import LOGITS_PROCESSOR, import_object, load_plugin, plugin_names
from quire.sample.logits_processor.interface import LogitsProcessor, ProcessorKind

ProcessorSource = str | type[ProcessorKind]


def load_processors(sources: Sequence[ProcessorSource]) -> list[type[ProcessorKind]]:
    """The processor classes, in the order given.

    Raises:
        ConfigError: a name is neither "module:Class" nor a plugin's, cannot be imported, or is no `LogitsProcessor`.
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
    if ":" not in name:
        return _plugin(name)
    module_name, _, class_name = name.partition(":")
    if not (module_name and class_name):
        raise ConfigError(
            f"logits processor {name!r} is malformed", hint="write 'module:Class'", field="logits_processors"
        )
    return _checked(import_object(name, f"logits processor {name!r}", "logits_processors"), repr(name))


def _plugin(name: str) -> type[ProcessorKind]:
    found: type[ProcessorKind] | None = load_plugin(LOGITS_PROCESSOR, name, ProcessorKind)
    if found is None:
        names = plugin_names(LOGITS_PROCESSOR)
        raise ConfigError(
            f"logits processor {name!r} is malformed: neither 'module:Class' nor the name of a plugin",
            hint="write 'module:Class'" + (f", or one of {', '.join(names)}" if names else ""),
            field="logits_processors",
        )
    return found


def _checked(found: object, name: str) -> type[ProcessorKind]:
    if isinstance(found, type) and issubclass(found, ProcessorKind):
        return found
    raise ConfigError(
        f"logits processor {name} is not a LogitsProcessor class",
        hint="derive it from quire.sample.logits_processor.LogitsProcessor",
        field="logits_processors",
    )
