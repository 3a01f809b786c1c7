"""What every test may rely on."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import certifi
import hypothesis
import pytest

# A case may take as long as it takes: how fast a machine is, and what else it runs, is nothing that a test checks.
hypothesis.settings.register_profile("house", deadline=None)
hypothesis.settings.load_profile("house")

# A shell starts what runs in the background with Ctrl-C ignored, and programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was imported stays out of garbage collections, and loggers of torch pass records on.

    A collection looks through a million objects of torch and of clients' packages otherwise (half a second). Pytest
    attaches itself to forty loggers of torch three times in every test where they do not pass records on.
    """
    gc.collect()
    gc.freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_sessionfinish() -> None:
    """Libraries count what is left of them when the interpreter ends."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients load one certificate, not a hundred: that takes 50 ms of each client, and tests ask no stranger."""
    first, end, _ = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    path = tmp_path_factory.mktemp("certificates") / "one.pem"
    path.write_text(first + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(path))
        yield


@pytest.fixture(scope="session", autouse=True)
def crash_reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engine cores that tests kill are described in a folder of the tests."""
    folder = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.crash_reports.default_directory", lambda: folder)
        yield


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
