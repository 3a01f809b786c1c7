from __future__ import annotations

import gc

import pytest

from quire.utils.garbage import collector_paused


def test_the_collector_is_paused_and_runs_again_whatever_happens():
    with pytest.raises(RuntimeError), collector_paused():
        assert not gc.isenabled()
        raise RuntimeError
    assert gc.isenabled()


def test_a_collector_that_the_user_turned_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
