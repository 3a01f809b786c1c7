"""The vocabulary as grammars see it, read from the tokenizer's files by the process that makes grammars. No state."""

from __future__ import annotations

from quire.errors import TokenizerError
from quire.structured_output.interface import Vocabulary
from quire.tokenization.tokenizer import load_tokenizer


def read_vocabulary(tokenizer_path: str, vocab_size: int, eos_token_id: int) -> Vocabulary:
    """The bytes of every id; special and unused ids have none, so that no grammar allows them.

    Args:
        tokenizer_path: directory of the tokenizer's files, or a GGUF file.
        vocab_size: width of the logits.

    Raises:
        TokenizerError: the files are unusable, or the bytes of a token depend on its neighbours.
    """
    tokenizer = load_tokenizer(tokenizer_path)
    table = tokenizer.table
    if table is None:
        raise TokenizerError("structured outputs need a tokenizer whose tokens stand for fixed bytes")
    hidden = tokenizer.special_ids | {eos_token_id}
    known = range(min(tokenizer.vocab_size, vocab_size))
    pieces = [b"" if token_id in hidden else table.piece(token_id) for token_id in known]
    pieces += [b""] * (vocab_size - len(pieces))
    special = {token_id: table.piece(token_id) for token_id in hidden if 0 <= token_id < tokenizer.vocab_size}
    return Vocabulary(tuple(pieces), eos_token_id, special)
