"""lm-format-enforcer: its backend (`backend`) and what it honours only in some places of a schema (`limits`)."""

from quire.structured_output.backends.lm_format_enforcer.backend import BACKEND as BACKEND
