from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def keep_thread_count() -> Iterator[None]:
    """The operations of a device set torch's thread count, which belongs to the process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
