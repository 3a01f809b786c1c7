"""Settings and values that users of vLLM know and Quire does not have yet.

Read by `config.build` and the configs: a neutral value of such a setting is accepted and dropped, any other is refused
by name, with the reason and what to do instead. The table is `config.not_yet_table`.
"""

from __future__ import annotations

from typing import Any

from quire.config.not_yet_table import MISSING, NO_EFFECT, SEVERAL
from quire.errors import UnsupportedError
from quire.utils.checks import shown

__all__ = ["NOT_YET", "NO_EFFECT", "QUANTIZATIONS_NOT_YET", "SEVERAL", "is_neutral", "not_yet_error", "what_instead"]

# Values of `quantization`.
QUANTIZATIONS_NOT_YET = (
    "deepseek_v4_fp8", "experts_int8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "fp_quant",
    "humming", "inc", "int8_per_channel_weight_only", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8",
    "moe_wna16", "mxfp8", "nvfp4_per_token", "online", "quark", "torchao",
)  # fmt: skip

# Setting -> the values that ask for nothing.
NOT_YET: dict[str, tuple[Any, ...]] = {name: neutral for one in MISSING for name, neutral in one.names.items()}


def is_neutral(name: str, value: object) -> bool:
    """True when `value` asks for nothing of the not-yet-supported setting `name`."""
    return any(type(value) is type(one) and value == one for one in NOT_YET[name])


def what_instead(name: str) -> tuple[str, str]:
    """(why the setting `name` is not there, what to do instead)."""
    return next((one.why, one.instead) for one in MISSING if name in one.names)


def not_yet_error(name: str, value: object) -> UnsupportedError:
    """The refusal of `value` for the not-yet-supported setting `name`."""
    why, instead = what_instead(name)
    return UnsupportedError(
        f"{name}={shown(value)}: {name} is a vLLM option that Quire does not implement yet: {why}",
        hint=f"leave out {name}; {instead}",
        field=name,
    )
