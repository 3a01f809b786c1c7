"""Connectors are found by name; what is not one, or not of this contract, is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.config.kv_transfer import KVTransferConfig
from quire.errors import ConfigError
from quire.kv_transfer.connector import KVConnector, KVConnectorRole
from quire.kv_transfer.registry import connector_class, make_connector
from tests.unit.kv_transfer.test_layout import LAYOUT

HERE = __name__


class Good(KVConnector):
    quire_contract = 1
    extra_config_keys = ("path",)


class Undeclared(KVConnector):
    pass


class Newer(KVConnector):
    quire_contract = 2


class Failing(KVConnector):
    quire_contract = 1

    def __init__(self, *args: Any) -> None:
        raise RuntimeError("no such device")


def config(name: str, **more: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_connector_module_path=HERE, **more)


def test_a_class_of_a_module_that_the_operator_names_is_made_with_its_settings():
    wanted = config("Good", kv_connector_extra_config={"path": "/x"})
    made = make_connector(connector_class(wanted), wanted, KVConnectorRole.WORKER, LAYOUT)
    assert isinstance(made, Good) and made.role is KVConnectorRole.WORKER and made.layout is LAYOUT


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (config("Undeclared"), "was written for version None of the contract"),
        (config("Newer"), "was written for version 2 of the contract"),
        (config("HERE"), "is not derived from KVConnector"),
        (config("Absent"), "has no 'Absent'"),
        (config("Good", kv_connector_extra_config={"paths": 1}), "has no key 'paths'"),
        (KVTransferConfig(kv_connector="Good", kv_connector_module_path="not.there"), "cannot import 'not.there'"),
        (KVTransferConfig(kv_connector="Good"), "'Good'"),
    ],
)
def test_what_cannot_be_used_is_refused_before_it_is_made(wanted, message):
    with pytest.raises(ConfigError, match=message) as caught:
        connector_class(wanted)
    assert caught.value.field == "kv_transfer_config" and caught.value.hint


def test_a_constructor_that_raises_is_an_error_of_the_settings():
    with pytest.raises(ConfigError, match="Failing cannot be made: RuntimeError: no such device"):
        make_connector(Failing, config("Failing"), KVConnectorRole.SCHEDULER, LAYOUT)
