"""A small version of `make test-kv-faults`."""

from __future__ import annotations

import os

from tests.robustness.kv_faults import CALLS, DAMAGES, main


def test_faults_of_every_kind_give_no_wrong_block_lose_no_request_and_are_counted(capfd):
    pid = os.getpid()
    status = main(["--count", "90", "--seed", "1"])
    assert os.getpid() == pid
    printed = capfd.readouterr().out
    assert status == 0, printed
    assert all(kind in printed for kind in (*DAMAGES, *CALLS, "SIGKILL at replace"))
