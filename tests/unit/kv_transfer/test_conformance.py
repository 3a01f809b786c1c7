"""The conformance check accepts connectors that keep the contract, and says what others do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quire.config.kv_transfer import KVTransferConfig
from quire.kv_transfer import conformance
from quire.kv_transfer.conformance import CHECKS, check_connector
from tests.unit.kv_transfer.scripted_connector import ScriptedConnector

HERE = __name__
PAGE = Path(__file__).parents[3] / "docs/how-to/connectors.md"
SHARED: dict[str, Any] = {}


class Forgetful(ScriptedConnector):
    """Never reports that it has saved."""

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str], set[str]]:
        super().get_finished(finished_req_ids)
        return set(), set()


class Careless(ScriptedConnector):
    """Reports a save before it has read the blocks."""

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str], set[str]]:
        early = {one[2] for one in self.under_way if one[0] > 0}
        sent, received = super().get_finished(finished_req_ids)
        return sent | early, received

    def start_load_kv(self) -> None:
        self.delay = lambda number: 1
        super().start_load_kv()


class Unsalted(ScriptedConnector):
    """Knows every block by its place."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return (len(request.block_hashes) * 16 - num_computed_tokens if self.known else 0), False


class Misplaced(ScriptedConnector):
    """Loads to the first blocks of a request."""

    def update_state_after_alloc(self, request: Any, block_ids: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        request_id, is_async, pairs = self.loads[-1]
        first = list(block_ids)[: len(pairs)]
        self.loads[-1] = request_id, is_async, [(name, i) for (name, _), i in zip(pairs, first, strict=True)]


class AnyLayout(ScriptedConnector):
    """Offers what any engine saved."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.known = SHARED.setdefault("known", set())
        self.kept = SHARED.setdefault("kept", {})


def config(name: str, module: str = HERE, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_connector_extra_config=extra)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "PATIENCE_S", 0.05)
    SHARED.clear()


def test_the_example_of_the_page_and_the_built_in_connectors_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(conformance, "PATIENCE_S", 60.0)
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "example_for_the_check.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check_connector(config("DictConnector", "example_for_the_check")) == {}
    assert check_connector(config("ScriptedConnector")) == {}
    files = {"shared_storage_path": str(tmp_path / "blocks")}
    assert check_connector(KVTransferConfig(kv_connector="ExampleConnector", kv_connector_extra_config=files)) == {}
    parts = [{"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(path)}}
             for path in (tmp_path / "a", tmp_path / "b")]  # fmt: skip
    several = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config={"connectors": parts})
    assert check_connector(several) == {}


@pytest.mark.parametrize(
    ("name", "check", "what"),
    [
        ("Forgetful", "saved blocks come back", "the save of a request was not reported"),
        ("Careless", "deferred frees", "read after they had been reported as sent"),
        ("Unsalted", "salts", "found under another name"),
        ("Misplaced", "blocks behind a cached prefix", "loaded to other places"),
        ("AnyLayout", "another layout", "blocks of another layout are offered"),
    ],
)
def test_what_breaks_the_contract_is_found_and_named(name, check, what):
    problems = check_connector(config(name))
    assert problems.keys() <= {*CHECKS, "another layout"}
    assert what in problems[check], problems
