"""What a request forbids besides its grammar: the field that leaves no token is named."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.grammar_bitmask import mask_of
from quire.core.sampling_params import SamplingParams
from quire.errors import ValidationError
from quire.structured_output.restrictions import Restrictions, check_ends

EOS, VOCAB = 40, 70


def conflict(allowed: list[int], output: list[int], **fields: Any) -> str | None:
    restrictions = Restrictions.of(SamplingParams(**fields), EOS, VOCAB)
    return None if restrictions is None else restrictions.conflict(mask_of(allowed, VOCAB), output)


def test_a_request_that_forbids_nothing_has_no_restrictions():
    assert Restrictions.of(SamplingParams(logit_bias={1: -100.0}), EOS, VOCAB) is None


@pytest.mark.parametrize(
    ("allowed", "output", "fields", "blamed"),
    [
        ([1, 2], [], {"allowed_token_ids": [3, EOS]}, "allowed_token_ids"),
        ([1, 2], [], {"allowed_token_ids": [2, EOS]}, None),
        ([1, 69], [], {"bad_words_token_ids": [[1], [69]]}, "bad_words"),
        ([1, 2], [], {"bad_words_token_ids": [[1]]}, None),
        ([2], [7, 8], {"bad_words_token_ids": [[7, 8, 2]]}, "bad_words"),
        ([2], [8, 7], {"bad_words_token_ids": [[7, 8, 2]]}, None),
        ([2], [8], {"bad_words_token_ids": [[7, 8, 2]]}, None),
        ([EOS], [1], {"min_tokens": 2}, "min_tokens"),
        ([EOS], [1, 1], {"min_tokens": 2}, None),
        ([EOS, 50], [1], {"min_tokens": 2, "stop_token_ids": [50]}, "min_tokens"),
        ([EOS, 5], [1], {"min_tokens": 2}, None),
        ([1, 2], [], {"logit_bias": {1: -1e300, 2: -1e300}}, "logit_bias"),
        ([1, 2], [], {"logit_bias": {1: -1e300, 2: -100.0}}, None),
        ([1, EOS], [], {"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_the_field_that_leaves_no_token_is_found(
    allowed: list[int], output: list[int], fields: dict[str, Any], blamed: str | None
):
    assert conflict(allowed, output, **fields) == blamed


def test_ids_of_which_none_ends_an_answer_are_refused_unless_something_else_ends_it():
    with pytest.raises(ValidationError, match="40") as caught:
        check_ends(SamplingParams(allowed_token_ids=[1, 2]), EOS)
    assert caught.value.field == "allowed_token_ids"
    for fields in ({"stop": "x"}, {"ignore_eos": True}, {"stop_token_ids": [2]}, {"allowed_token_ids": [1, EOS]}):
        check_ends(SamplingParams(**{"allowed_token_ids": [1, 2], **fields}), EOS)  # type: ignore[arg-type]
