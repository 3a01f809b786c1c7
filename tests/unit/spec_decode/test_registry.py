"""What is said of the configured proposers: for the log, and what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from quire.config.speculative import SpeculativeConfig
from quire.spec_decode.registry import describe, make_controller, make_proposer, stats_reader
from tests.unit.spec_decode.test_history_proposers import begin, end, rows_of


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"method": ("ngram",)}, "ngram; at most 8 draft tokens per request and step"),
        (
            {"method": ("suffix", "eagle"), "model": "heads", "num_speculative_tokens": 4},
            "suffix, else eagle (heads); at most 4 draft tokens per request and step",
        ),
        (
            {"method": ("mtp",), "enable_adaptive_verification": False, "acceptance": "rejection"},
            "mtp (its own heads); at most 1 draft tokens per request and step, all of which are verified; "
            "acceptance rejection",
        ),
    ],
)
def test_the_log_names_what_drafts(config, text):
    assert describe(SpeculativeConfig(**config)) == text


@pytest.mark.parametrize("method", [("ngram",), ("suffix",), ("suffix", "ngram")])
def test_memory_of_texts_and_past_answers_is_told(method):
    config = SpeculativeConfig(method=method)
    proposer, controller = make_proposer(config, None), make_controller(config, float)
    read = stats_reader(proposer, controller)
    assert read().history_bytes == read().num_stored == 0 and read().controller is not None
    begin(proposer, 0)
    begin(proposer, 1)
    proposer.propose(rows_of([1, 2, 3, 1, 2], handles=(0,)))
    end(proposer, 1, np.arange(40).tolist())
    proposer.propose(rows_of([1, 2, 3, 1, 2, 3], handles=(0,)))
    told = read()
    assert told.history_bytes > 0
    assert (told.num_stored == 1 and told.store_bytes > 0) == ("suffix" in method)
    assert stats_reader(proposer, None)().controller is None
