"""RequestSnapshot: a request and how far its answer is, from which another replica goes on with the same bytes.

Made and accepted by `AsyncLLM`, carried by operators' routes. It needs no state of an engine: randomness is a function
of seed and position, the position is the number of tokens, and a grammar is where the answer's tokens have brought it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.sampling_params import SamplingParams
from quire.errors import QuireError, ValidationError

VERSION = 1
MAX_SNAPSHOT_TOKENS = 1 << 22
FIELD = "snapshot"


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request with one answer.

    Attributes:
        version: of this form.
        model: name under which it is served; the replica must serve one of this name.
        request_id: the user's name for it.
        prompt_token_ids, output_token_ids: its tokens so far; the next position follows from their number.
        seed: key of its random numbers.
        sampling_params: as the engine has them: defaults filled in, `n` 1.
        cache_salt: as in the request.
        num_shared_tokens: first tokens of the prompt whose blocks are shared whatever the salt.
    """

    version: int = VERSION
    model: str
    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    seed: int
    sampling_params: SamplingParams
    cache_salt: str | None = None
    num_shared_tokens: int = 0

    def to_json(self) -> bytes:
        """For another replica's `snapshot_from`."""
        return msgspec.json.encode(self)


def snapshot_from(value: bytes | dict[str, Any]) -> RequestSnapshot:
    """The snapshot in a JSON text, or in what one was decoded to.

    Raises:
        ValidationError: it is not one, or of another version.
    """
    try:
        if isinstance(value, bytes):
            snapshot = msgspec.json.decode(value, type=RequestSnapshot)
        else:
            snapshot = msgspec.convert(value, RequestSnapshot)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValidationError(f"{FIELD} is not valid: {error}", hint="send what a replica gave", field=FIELD) from None
    except QuireError as error:  # of the sampling parameters
        raise ValidationError(f"{FIELD}: {error.message}", hint=error.hint or "", field=FIELD) from None
    if snapshot.version != VERSION:
        raise ValidationError(
            f"{FIELD} has version {snapshot.version}, this server takes version {VERSION}",
            hint="use replicas of one version", field=FIELD,
        )  # fmt: skip
    if len(snapshot.prompt_token_ids) + len(snapshot.output_token_ids) > MAX_SNAPSHOT_TOKENS:
        raise ValidationError(f"{FIELD} has too many tokens", hint=f"at most {MAX_SNAPSHOT_TOKENS}", field=FIELD)
    return snapshot
