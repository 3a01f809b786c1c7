"""Every family, every check; and the page that says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.families.choice import choose_arch
from quire.config.families.registry import FAMILIES, parse_config
from quire.config.model import LoadConfig
from quire.distributed.parallel_context import ParallelContext
from quire.models.loader import load_model
from quire.models.model_dir import read_model_dir
from quire.models.stored_weights import check_weights, read_weights
from quire.simulator.mixers import cache_specs
from tests.compile_pools import shared_compile_pools
from tests.effort import effort
from tests.models.families.cases import CASES
from tests.models.families.checks import CHECKS, Subject
from tests.models.families.table import FOLDER, PAGES, render
from tests.models.families.through_transformers import THROUGH_TRANSFORMERS

SUBJECTS = {**CASES, **THROUGH_TRANSFORMERS}


@pytest.fixture(scope="module", autouse=True)
def one_compile_pool() -> Iterator[None]:
    with shared_compile_pools():
        yield


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    case, path = SUBJECTS[request.param], tmp_path_factory.mktemp(request.param)
    yield Subject(case, path, case.write(path))


@pytest.mark.parametrize("check", CHECKS)
def test_family(subject: Subject, check: str):
    reason = subject.case.reasons.get(check)
    if reason is not None:
        pytest.skip(reason)
    if subject.case.is_brief and check != "parity" and not effort(False, True):
        pytest.skip("part of make test-full")
    CHECKS[check](subject)


def test_the_planner_knows_what_the_layers_keep(subject: Subject):
    if subject.case.title in {case.title for case in THROUGH_TRANSFORMERS.values()}:
        pytest.skip("the layers of transformers' classes are not described")
    arch = parse_config(read_model_dir(subject.path).config)
    device, parallel = torch.device("cpu"), ParallelContext()
    model = load_model(arch, "", LoadConfig(load_format="dummy"), torch.bfloat16, device, parallel, None, 64, 0)
    assert list(cache_specs(arch, 16, 2).values()) == list(model.kv_cache_specs(16).values())


def test_headers_and_shape_alone_say_that_the_weights_are_the_models(subject: Subject):
    arch = choose_arch(read_model_dir(subject.path).config, "auto")
    stored = read_weights(subject.path)
    check_weights(stored, arch)
    learned = {tensor.data_ptr(): tensor.numel() for tensor in subject.reference.state_dict().values()}
    assert stored.num_parameters == sum(learned.values())


@pytest.mark.parametrize("page", PAGES)
def test_the_page_says_what_is_tested(page: str):
    assert (FOLDER / page).read_text() == render(page), "run python -m tests.models.families.table"


@pytest.mark.parametrize(
    ("name", "limits"),
    [("mpt", {"attn_config": {"clip_qkv": 0.3}}), ("olmoe", {"clip_qkv": 0.8})],
    ids=["mpt", "olmoe"],
)
def test_limits_on_queries_keys_and_values_equal_those_of_transformers(
    tmp_path: Path, name: str, limits: Mapping[str, Any]
):
    case = dataclasses.replace(CASES[name], fields={**CASES[name].fields, **limits})
    subject = Subject(case, tmp_path, case.write(tmp_path))
    CHECKS["parity"](subject)
    CHECKS["captured steps"](subject)


def test_every_architecture_has_a_case():
    assert {name for case in CASES.values() for name in case.names} == set(FAMILIES)


def test_classes_without_a_family_are_among_those_that_run_through_transformers():
    names = {name for case in THROUGH_TRANSFORMERS.values() for name in case.names}
    assert len(names - set(FAMILIES)) >= 6
