"""Which library a request gets follows from what its backend declares, and from nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from quire.config.structured_outputs import BACKENDS, StructuredOutputsConfig
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import ValidationError
from quire.structured_output import registry
from quire.structured_output.capabilities import KINDS, Capabilities, Problem, Subschema
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.registry import capabilities_of

AUTO = StructuredOutputsConfig()


def _check_subschema(place: Subschema, root: Any) -> Problem | None:
    is_set = isinstance(place.schema, dict) and place.schema.get("uniqueItems")
    return Problem(f"{place.path}/uniqueItems", "only of the whole") if is_set and place.schema is not root else None


@pytest.fixture
def fifth(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A further library, which is a file and a name: it knows sets, and choices of at most two."""
    module = ModuleType("fifth")
    capabilities = Capabilities(
        module="json",
        kinds=frozenset(("json", "choice", "lark")),
        keywords=frozenset(("type", "items", "uniqueItems")),
        max_choices=2,
        check_subschema=_check_subschema,
    )
    module.BACKEND = SimpleNamespace(capabilities=capabilities)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quire.structured_output.backends.fi_fth", module)
    monkeypatch.setattr(registry, "BACKENDS", ("fi-fth",))
    yield "fi-fth"


def test_a_further_library_is_chosen_and_refuses_by_what_it_declares(fifth: str):
    numbers = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert resolve_structured_outputs(StructuredOutputsParams(json=numbers), AUTO).backend == fifth
    assert resolve_structured_outputs(StructuredOutputsParams(grammar="start: /a/"), AUTO).backend == fifth
    for params, reason in (
        (StructuredOutputsParams(json={"type": "array", "items": numbers}), "#/items/uniqueItems: only of the whole"),
        (StructuredOutputsParams(json={"type": "string", "format": "date"}), "#/format: format is not supported"),
        (StructuredOutputsParams(choice=["a", "b", "c"]), "more than 2 choices are not supported"),
    ):
        with pytest.raises(ValidationError, match=f"fi-fth: {reason}"):
            resolve_structured_outputs(params, AUTO)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_declares_known_kinds_and_is_described_without_its_library(backend: str):
    capabilities = capabilities_of(backend)
    assert capabilities.kinds and capabilities.kinds <= KINDS
    assert ("structural_tag" in capabilities.kinds) == bool(capabilities.tags)
