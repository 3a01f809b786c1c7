"""What every test may rely on."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_that_can_be_caught(request: pytest.FixtureRequest) -> Iterator[None]:
    """For a test that looks at the log: the package's, as it is before anything in this process has configured it."""
    if "caplog" not in request.fixturenames:
        yield
        return
    logger = logging.getLogger("quire")
    before = logger.level, logger.propagate
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    yield
    logger.setLevel(before[0])
    logger.propagate = before[1]
