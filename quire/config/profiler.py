"""Profiles: where they go and how much they hold. From `profile`, or `profiler_config` (JSON, vLLM's names)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from quire.config.json_object import errors_of, parse_object
from quire.errors import ConfigError
from quire.utils.checks import check_bool, check_int, check_text, shown

FIELD = "profiler_config"
MAX_STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """How steps are profiled once that is started.

    Attributes:
        profiler: "torch": operations of torch are recorded beside the native kernels; "kernels": they are not.
        torch_profiler_dir: where profiles go.
        torch_profiler_record_shapes, torch_profiler_with_stack: what is recorded of operations of torch.
        delay_iterations: steps before the first that is recorded.
        max_iterations: steps after which a profile is written by itself; 0 = when it is stopped.
    """

    profiler: str = "torch"
    torch_profiler_dir: str = ""
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_stack: bool = False
    delay_iterations: int = 0
    max_iterations: int = 0

    def __post_init__(self) -> None:
        with errors_of(FIELD):
            check_text("profiler", self.profiler)
            check_text("torch_profiler_dir", self.torch_profiler_dir)
            for name in ("torch_profiler_record_shapes", "torch_profiler_with_stack"):
                check_bool(name, getattr(self, name))
            for name in ("delay_iterations", "max_iterations"):
                check_int(name, getattr(self, name), 0, MAX_STEPS)
        if self.profiler not in ("torch", "kernels"):
            raise ConfigError(
                f"{FIELD}: profiler {shown(self.profiler)} is not supported", hint="use torch or kernels", field=FIELD
            )
        for name in ("torch_profiler_record_shapes", "torch_profiler_with_stack"):
            if getattr(self, name) and self.profiler != "torch":
                raise ConfigError(
                    f"{FIELD}: {name} has no effect with profiler={self.profiler!r}",
                    hint=f'use profiler "torch", or leave out {name}', field=FIELD,
                )  # fmt: skip
        if not self.torch_profiler_dir:
            raise ConfigError(
                f"{FIELD}: torch_profiler_dir is missing", hint="name the directory for profiles", field=FIELD
            )


def parse_profiler_config(directory: str | None, text: str | None) -> ProfilerConfig | None:
    """What the two settings say; None = there are no profiles.

    Raises:
        ConfigError: both are given, or the JSON is not an object with known keys.
    """
    if text is None or text.strip() == "{}":
        return None if directory is None else ProfilerConfig(profiler="kernels", torch_profiler_dir=directory)
    if directory is not None:
        raise ConfigError(
            "profile and profiler_config say the same in two ways", hint="leave out one of them", field="profile"
        )
    known = [field.name for field in fields(ProfilerConfig)]
    values = parse_object(FIELD, text, known, example='{"profiler": "torch", "torch_profiler_dir": "profiles"}')
    return ProfilerConfig(**{name: value for name, value in values.items() if value is not None})
