"""kv_hints: what a client says of the KV blocks of a request, in the envelope that vLLM and SGLang discuss.

    {"protocol_version": "1", "message_id": "m", "actions": [{"action_id": "a", "action_type": "share", "payload": {}}]}

Checked with the sampling parameters (`extra_args["kv_hints"]`), read by the tiers of the scheduler. Hints are advice:
what is not honoured changes nothing, and no answer depends on one. Values only.
"""

from __future__ import annotations

from typing import Any

from quire.errors import ValidationError
from quire.utils.checks import shown, wrong_type

KV_HINTS = "kv_hints"
SHARE, PREFETCH = "share", "prefetch"
ACTIONS = (SHARE, PREFETCH, "demote", "pin", "retain")
MAX_ACTIONS = 32
MAX_NAME_CHARS = 256
ENVELOPE_KEYS = frozenset(("protocol_version", "message_id", "actions"))
ACTION_KEYS = frozenset(("action_id", "action_type", "action_version", "payload"))


def check_kv_hints(value: Any) -> None:
    """Refuse what is not an envelope.

    Raises:
        ValidationError: says where it is wrong; actions that are not known are refused, too.
    """
    if not isinstance(value, dict):
        raise wrong_type(KV_HINTS, value, "an object")
    _check_keys(KV_HINTS, value, ENVELOPE_KEYS)
    actions = value.get("actions")
    if not isinstance(actions, list) or len(actions) > MAX_ACTIONS:
        raise _error("kv_hints.actions is not a list of at most 32 actions")
    for number, action in enumerate(actions):
        where = f"kv_hints.actions[{number}]"
        if not isinstance(action, dict):
            raise _error(f"{where} is not an object")
        _check_keys(where, action, ACTION_KEYS)
        kind = action.get("action_type")
        if kind not in ACTIONS:
            raise _error(f"{where}.action_type={shown(kind)} is not one of {', '.join(ACTIONS)}")
        if not isinstance(action.get("payload", {}), dict):
            raise _error(f"{where}.payload is not an object")


def hinted_actions(extra_args: dict[str, Any] | None) -> frozenset[str]:
    """The types of the actions in checked parameters."""
    hints = None if not extra_args else extra_args.get(KV_HINTS)
    return frozenset() if not hints else frozenset(action["action_type"] for action in hints["actions"])


def _check_keys(where: str, value: dict[str, Any], known: frozenset[str]) -> None:
    for key, one in value.items():
        if key not in known:
            raise _error(f"{where} has no key {shown(key)}")
        if isinstance(one, str) and len(one) > MAX_NAME_CHARS:
            raise _error(f"{where}.{key} is longer than {MAX_NAME_CHARS} characters")


def _error(message: str) -> ValidationError:
    hint = 'for example {"actions": [{"action_type": "share"}]}'
    return ValidationError(message, hint=hint, field=KV_HINTS)
