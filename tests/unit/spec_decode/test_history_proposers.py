"""Proposers that draft from history: by n-grams, by suffixes, in turn, and with tenants apart."""

from __future__ import annotations

import numpy as np
import pytest

from quire.core.drafts import DraftProposer, DraftRows
from quire.core.engine_messages import EngineCoreRequest
from quire.core.sampling_params import SamplingParams
from quire.errors import NativeLibraryError
from quire.spec_decode import histories
from quire.spec_decode.answer_store import answer_namespace
from quire.spec_decode.chained import ChainedProposer
from quire.spec_decode.filtered import FilteredProposer
from quire.spec_decode.ngram import NgramProposer
from quire.spec_decode.suffix import SuffixProposer

PROMPT = [7, 8]
SECRET = list(range(100, 130))


def ask(proposer: DraftProposer, *texts: list[int], handles: tuple[int, ...] = (), most: int = 8) -> list[list[int]]:
    """Drafts for each text."""
    proposals = proposer.propose(rows_of(*texts, handles=handles, most=most))
    ends = np.cumsum(proposals.counts)
    return [part.tolist() for part in np.split(proposals.token_ids, ends[:-1])]


def rows_of(*texts: list[int], handles: tuple[int, ...] = (), most: int = 8) -> DraftRows:
    token_ids = np.zeros((len(texts), max(map(len, texts))), dtype=np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    return DraftRows(
        rows=np.arange(len(texts), dtype=np.intp),
        handles=np.array(handles or range(len(texts)), dtype=np.int64),
        num_tokens=np.array([len(text) for text in texts], dtype=np.int32),
        max_tokens=np.full(len(texts), most, dtype=np.int32),
        token_ids=token_ids,
    )


def begin(proposer: DraftProposer, handle: int, tenant: str = "", cache_salt: str | None = None) -> None:
    proposer.begin(
        EngineCoreRequest(
            handle=handle, request_id=str(handle), prompt_token_ids=np.array(PROMPT, np.int32),
            sampling_params=SamplingParams(), seed=0, tenant=tenant, cache_salt=cache_salt,
        )
    )  # fmt: skip


def end(proposer: DraftProposer, handle: int, answer: list[int]) -> None:
    proposer.end(handle, np.array(PROMPT + answer, dtype=np.int32), len(PROMPT))


def test_ngrams_have_five_tokens_unless_said_otherwise():
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5]
    assert ask(NgramProposer(3), text, text[1:]) == [[6, 1, 2], []]
    assert ask(NgramProposer(3, prompt_lookup_min=4), text[1:]) == [[6, 1, 2]]
    assert ask(NgramProposer(3, 2, 3), [3, 4, 5, 9, *text[1:]]) == [[9, 2, 3]], "the first of the longest allowed"


def test_a_row_gets_no_more_drafts_than_it_asks_for():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]
    for proposer in (NgramProposer(4), SuffixProposer(4)):
        assert ask(proposer, text) == [[7, 8, 9, 1]]
        assert ask(proposer, text, most=2) == [[7, 8]]


def test_answers_are_drafted_from_but_prompts_are_not():
    proposer = SuffixProposer(8)
    begin(proposer, 0)
    end(proposer, 0, SECRET)
    begin(proposer, 1)
    assert ask(proposer, SECRET[:3], handles=(1,)) == [SECRET[3:6]]
    assert ask(proposer, [9, *PROMPT], handles=(1,)) == [[]]


@pytest.mark.parametrize("other", [("b", None), ("a", "salt"), ("", None)])
def test_answers_of_another_tenant_or_salt_are_not_drafted_from(other: tuple[str, str | None]):
    proposer = SuffixProposer(8)
    begin(proposer, 0, "a")
    end(proposer, 0, SECRET)
    begin(proposer, 1, *other)
    for length in range(1, 20):
        assert ask(proposer, SECRET[:length], handles=(1,)) == [[]]
    begin(proposer, 2, "a")
    assert ask(proposer, SECRET[:4], handles=(2,)) == [SECRET[4:8]]


def test_a_setting_lets_tenants_draft_from_each_others_answers():
    proposer = SuffixProposer(8, share_answers=True)
    begin(proposer, 0, "a")
    end(proposer, 0, SECRET)
    begin(proposer, 1, "b", "salt")
    assert ask(proposer, SECRET[:4], handles=(1,)) == [SECRET[4:8]]


def test_namespaces_differ_for_all_pairs_of_tenant_and_salt():
    pairs = [("", None), ("", ""), ("a", None), ("a", "b"), ("ab", ""), ("a", "none"), ("a:", "b"), ("asalt:", ""),
             ("", "\udcff"), ("2:a", None)]  # fmt: skip
    assert len({answer_namespace(*pair, is_shared=False) for pair in pairs}) == len(pairs)


def test_without_a_store_drafts_come_from_the_request_alone():
    proposer = SuffixProposer(8, max_cached_requests=0)
    begin(proposer, 0)
    end(proposer, 0, SECRET)
    begin(proposer, 1)
    assert ask(proposer, SECRET[:3], handles=(1,)) == [[]]
    assert proposer.stats().num_store_bytes == 0


def test_rows_that_the_first_proposer_leaves_empty_go_to_the_second():
    chained = ChainedProposer(NgramProposer(8), SuffixProposer(8))
    repeated, short, fresh = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], [1, 2, 3, 1, 2], [1, 2, 3]
    proposals = chained.propose(rows_of(short, repeated, fresh, short))
    assert proposals.counts.tolist() == [2, 6, 0, 2]
    assert proposals.token_ids.tolist() == [3, 1, 6, 1, 2, 3, 4, 5, 3, 1]
    assert proposals.sources[[0, 1, 3]].tolist() == [1, 0, 1]
    assert proposals.match_lengths.tolist() == [2, 5, 0, 2]
    assert len(proposals.scores) == 10 and ((proposals.scores > 0) & (proposals.scores <= 1)).all()
    begin(chained, 4)
    end(chained, 4, SECRET)
    begin(chained, 5)
    assert ask(chained, SECRET[:3], handles=(5,)) == [SECRET[3:6]]


def test_an_ngram_proposer_in_a_chain_can_use_the_suffix_proposers_index():
    suffix = SuffixProposer(8, min_token_prob=1.0)
    for chained in (
        ChainedProposer(suffix, NgramProposer(8, 1, 3, suffix.histories)),
        ChainedProposer(NgramProposer(8, 1, 3, suffix.histories), suffix),
    ):
        begin(chained, 1)
        proposals = chained.propose(rows_of([1, 2, 1, 3, 1, 2, 1, 3, 4, 1], handles=(1,)))
        assert proposals.counts.sum() and suffix.stats().num_indexed_tokens % 10 == 0
        end(chained, 1, SECRET)
    begin(suffix, 2)
    assert ask(suffix, SECRET[:3], handles=(2,)) == [SECRET[3:6]]
    assert suffix.stats().num_requests == 1


def test_chains_can_be_chained():
    chained = ChainedProposer(NgramProposer(8), ChainedProposer(NgramProposer(8, 4, 4), SuffixProposer(8)))
    proposals = chained.propose(rows_of([1, 2, 1, 2, 1], [3, 1, 2, 4, 5, 9, 1, 2, 4, 5]))
    assert proposals.sources.tolist() == [2, 1]


def test_no_rows_get_no_drafts():
    for proposer in (NgramProposer(8), SuffixProposer(8), ChainedProposer(NgramProposer(8), SuffixProposer(8))):
        rows = rows_of([1])
        none = DraftRows(rows.rows[:0], rows.handles[:0], rows.num_tokens[:0], rows.max_tokens[:0], rows.token_ids)
        assert not len(proposer.propose(none).counts)


def test_without_the_native_library_drafts_are_searched_in_python(monkeypatch: pytest.MonkeyPatch):
    def refuse(limits: object) -> None:
        raise NativeLibraryError("it was not built")

    monkeypatch.setattr(histories, "NativeHistories", refuse)
    assert ask(SuffixProposer(8), [1, 2, 3, 1, 2]) == [[3, 1]]


def test_requests_that_are_excluded_get_no_drafts_and_their_answers_are_kept():
    text, excluded = [1, 2, 3, 1, 2], set[int]()
    proposer = FilteredProposer(SuffixProposer(4), excluded)
    for handle in (5, 6, 7):
        begin(proposer, handle)
    whole = proposer.propose(rows_of(text, [9], text, handles=(5, 6, 7)))
    excluded.add(5)
    found = proposer.propose(rows_of(text, [9], text, handles=(5, 6, 7)))
    assert found.counts.tolist() == [0, 0, whole.counts[2]] and found.match_lengths.tolist() == [0, 0, 2]
    assert found.token_ids.tolist() == whole.token_ids[whole.counts[0] :].tolist() and len(found.token_ids)
    excluded |= {6, 7}
    assert not len(proposer.propose(rows_of(text, handles=(7,))).token_ids)
    end(proposer, 5, [50, 51, 52, 53])
    begin(proposer, 8)
    assert ask(proposer, [50, 51], handles=(8,)) != [[]], "from the answer of a request that had no drafts"
