"""Answers of a GGUF file and of an AWQ checkpoint have the form that was asked for, and are the same in any batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM
from tests.models.stored_models import LEAF_KINDS, make_leaf
from tests.structured.libraries import needs_libraries
from tests.structured.test_answers import FORMS, answers, has_form, params

pytestmark = needs_libraries


@pytest.fixture(scope="module", params=LEAF_KINDS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The embedded model on a small pool of blocks: many requests at once do not fit it."""
    path = make_leaf(request.param, tmp_path_factory.mktemp(request.param))
    settings = {"attention_backend": "native_cpu", "block_size": 16, "num_gpu_blocks_override": 40}
    llm = LLM(str(path), max_num_seqs=16, max_model_len=256, **settings)
    yield llm
    llm.llm_engine.shutdown()


def test_answers_have_their_form_alone_and_among_free_ones(llm: LLM):
    forms = [*FORMS.values(), None]
    mixed = [params(form, max_tokens=150 if form else 40) for form in forms]
    crowd = answers(llm, mixed)
    for (answer,), form in zip(crowd, forms, strict=True):
        assert form is None or (answer.finish_reason == "stop" and has_form(form, answer.text)), answer.text
    assert [one[0].text for one in crowd] == [answers(llm, [one])[0][0].text for one in mixed]
