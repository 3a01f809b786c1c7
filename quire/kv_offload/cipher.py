"""BlockCipher: files that cannot be read, changed unnoticed or recognised without the key. Used by `BlockFiles`.

A payload becomes a nonce of 12 random bytes, the AES-256-GCM of it, and a tag of 16 bytes, which also covers the
block's name. Random nonces are good for 2^32 blocks under one key (NIST SP 800-38D, section 8.3). Names of files are
keyed, too: otherwise who can read the directory could look whether a certain prompt was stored.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ConfigError
from quire.kv_offload.faults import BlockFault, FaultKind

KEY_BYTES = 32
NONCE_BYTES = 12
OVERHEAD_BYTES = NONCE_BYTES + 16
"""By so much what is stored is longer than a payload."""
FIELD = "kv_disk_key_file"
HOW = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


class BlockCipher:
    """Seals and opens payloads.

    Args:
        key: [KEY_BYTES] secret.

    Attributes:
        key_id: names the key; nothing about the key follows from it.

    Raises:
        ConfigError: the package `cryptography` is not installed.
    """

    def __init__(self, key: bytes) -> None:
        assert len(key) == KEY_BYTES, "a key of AES-256"
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                "kv_disk_key_file needs the package cryptography, which is not installed",
                hint="pip install 'quire[encryption]', or leave out kv_disk_key_file", field=FIELD,
            ) from None  # fmt: skip
        self._invalid_tag: type[Exception] = InvalidTag
        self._cipher: Any = AESGCM(_derived(key, b"payloads"))
        self._name_key = _derived(key, b"names")
        self.key_id = _derived(key, b"key id").hex()

    def name_of(self, key: bytes) -> bytes:
        """The name under which a block with this key is stored; 32 bytes."""
        return hashlib.blake2b(key, key=self._name_key, digest_size=32).digest()

    def seal(self, name: bytes, payload: np.ndarray) -> np.ndarray:
        """What is stored of a payload: [num_bytes + OVERHEAD_BYTES] uint8."""
        nonce = os.urandom(NONCE_BYTES)
        return np.frombuffer(nonce + self._cipher.encrypt(nonce, payload.data, name), np.uint8)

    def open(self, name: bytes, sealed: np.ndarray, payload: np.ndarray) -> None:
        """Turn what `seal` gave into the payload ([num_bytes] uint8).

        Raises:
            BlockFault: it was changed, or sealed under another key or name.
        """
        try:
            opened = self._cipher.decrypt(sealed[:NONCE_BYTES].tobytes(), sealed[NONCE_BYTES:].data, name)
        except self._invalid_tag:
            raise BlockFault(FaultKind.WRONG_TAG, "it was changed, or sealed with another key") from None
        payload[:] = np.frombuffer(opened, np.uint8)


def read_key(path: Path) -> bytes:
    """The key in a file: 64 hexadecimal digits, and white space around them.

    Raises:
        ConfigError: it cannot be read, others may read it, or it holds something else.
    """
    try:
        with path.open("rb") as file:
            mode, text = os.fstat(file.fileno()).st_mode, file.read(1024)
    except OSError as error:
        raise ConfigError(f"{FIELD}={str(path)!r} cannot be read: {error.strerror}", hint=HOW, field=FIELD) from None
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{FIELD}={str(path)!r} can be read by other users", hint="chmod 600 it", field=FIELD)
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        problem = f"{FIELD}={str(path)!r} does not hold {2 * KEY_BYTES} hexadecimal digits"
        raise ConfigError(problem, hint=HOW, field=FIELD)
    return key


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(b"quire kv_disk " + purpose, key=key, digest_size=KEY_BYTES).digest()
