"""Profiles: where they go and how much they hold. From `profile`, or `profiler_config` (JSON, vLLM's names)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import ConfigError, QuireError, nearest
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
        try:
            check_text("profiler", self.profiler)
            check_text("torch_profiler_dir", self.torch_profiler_dir)
            for name in ("torch_profiler_record_shapes", "torch_profiler_with_stack"):
                check_bool(name, getattr(self, name))
            for name in ("delay_iterations", "max_iterations"):
                check_int(name, getattr(self, name), 0, MAX_STEPS)
        except QuireError as error:
            raise ConfigError(f"{FIELD}: {error.message}", hint=error.hint, field=FIELD) from None
        if self.profiler not in ("torch", "kernels"):
            raise ConfigError(
                f"{FIELD}: profiler {shown(self.profiler)} is not supported", hint="use torch or kernels", field=FIELD
            )
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
    try:
        values: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{FIELD}={shown(text)} is not a JSON object",
            hint='for example {"profiler": "torch", "torch_profiler_dir": "profiles"}', field=FIELD,
        )  # fmt: skip
    known = [field.name for field in fields(ProfilerConfig)]
    for name in values:
        if name not in known:
            close = nearest(name[:100], known)
            hint = f"did you mean {close!r}?" if close else f"keys are {', '.join(known)}"
            raise ConfigError(f"{FIELD} has no key {shown(name)} here", hint=hint, field=FIELD)
    return ProfilerConfig(**{name: value for name, value in values.items() if value is not None})
