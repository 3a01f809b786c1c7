"""Proofs, on both sides of a connection, that the other has the same key. They say who speaks; nothing is encrypted.

Both send a nonce, and each a proof over both of them. Used between engines (`kv_transfer.pull`) and ranks of several
machines (`distributed.host_links`).
"""

from __future__ import annotations

import hashlib
import hmac
import os

NONCE_BYTES = 32
PROOF_BYTES = 32


def new_nonce() -> bytes:
    """For one connection."""
    return os.urandom(NONCE_BYTES)


def proof_of(key: bytes, side: str, challenge: bytes, nonce: bytes) -> bytes:
    """That the side that sends it has the key, for this connection and in this direction alone."""
    return hmac.new(key, side.encode() + challenge + nonce, hashlib.sha256).digest()


def is_proof(proof: bytes, key: bytes, side: str, challenge: bytes, nonce: bytes) -> bool:
    """Whether it is the one of that side, of a holder of this key."""
    return hmac.compare_digest(proof, proof_of(key, side, challenge, nonce))
