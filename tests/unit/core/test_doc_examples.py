"""Examples in docstrings do what they say."""

from __future__ import annotations

import doctest

import pytest

from quire.core import sampling_params, structured_outputs


@pytest.mark.parametrize("module", [sampling_params, structured_outputs], ids=lambda module: module.__name__)
def test_examples_of_parameters_do_what_they_say(module):
    result = doctest.testmod(module)
    assert result.attempted and not result.failed
