"""Variables of a launcher: what they say, and what is wrong with them."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from quire.distributed.launch import read_launch
from quire.distributed.rank_link import RankLink
from quire.distributed.rendezvous import Rendezvous
from quire.errors import CommunicationError, ConfigError

VARIABLES = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip


def read(group_size: int = 2, num_groups: int = 2, **changes: str | None) -> Any:
    variables = {name: value for name, value in {**VARIABLES, **changes}.items() if value is not None}
    return read_launch(variables, group_size, num_groups, "tensor_parallel_size=2 and data_parallel_size=2")


def test_ranks_are_numbered_group_by_group():
    launch = read()
    assert (launch.rank, launch.group, launch.group_rank, launch.local_rank, launch.port) == (3, 1, 1, 1, 29500)
    assert read(LOCAL_RANK=None, LOCAL_WORLD_SIZE=None).local_rank is None


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("RANK", None, "RANK is missing"),
        ("MASTER_PORT", "", "MASTER_PORT is missing"),
        ("RANK", "4", "RANK='4' is not a number from 0 to 3"),
        ("RANK", "-1", "RANK='-1' is not a number"),
        ("RANK", "\u0663", "is not a number"),
        ("LOCAL_RANK", "x", "LOCAL_RANK='x' is not a number from 0 to 3"),
        ("LOCAL_WORLD_SIZE", "1", "LOCAL_WORLD_SIZE='1' is not a number from 2 to 4"),
        ("WORLD_SIZE", "2", "WORLD_SIZE is 2, and tensor_parallel_size=2 and data_parallel_size=2 needs 4 processes"),
        ("MASTER_PORT", "70000", "MASTER_PORT='70000' is not a number from 1 to 65535"),
        ("MASTER_ADDR", "a b", "MASTER_ADDR='a b' is not the name of a machine"),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(name: str, value: str | None, message: str):
    with pytest.raises(ConfigError) as caught:
        read(**{name: value})
    assert message in caught.value.message and caught.value.field == name and caught.value.hint


def test_without_rank_0_there_is_no_rendezvous():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    launch = read(MASTER_PORT=str(port))
    with pytest.raises(CommunicationError, match="rank 0 has not come"):
        Rendezvous(launch, has_store=False, timeout_s=0.2)


def test_what_is_no_message_of_a_rank_ends_its_connection_with_its_name():
    ends = socket.socketpair()
    with ends[1] as other:
        link = RankLink(ends[0], 3, dict, " (process 7)")
        other.sendall(b"\x02\x00\x00\x00\xc1\xc1")
        with pytest.raises(CommunicationError, match="rank 3 sends"):
            link.try_receive(1)
        other.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(CommunicationError, match="rank 3 sends a message of 4294967295 bytes"):
            link.try_receive(1)
    with pytest.raises(CommunicationError, match=r"rank 3 \(process 7\) has ended"):
        link.receive(dict, "speak", 1)
    link.close()
