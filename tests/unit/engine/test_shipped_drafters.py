"""A method that needs a model and names none takes what lies in the target's own directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.engine.config_lookup import look_up
from quire.engine.shipped_drafters import FOLDERS, with_shipped_drafter
from quire.errors import ConfigError
from quire.models.hub import resolve_model_path


def speculating(**keys: object) -> QuireConfig:
    return build_config(speculative_config=keys)


def model_of(config: QuireConfig) -> str | None:
    assert config.speculative is not None
    return config.speculative.model


@pytest.mark.parametrize("method", FOLDERS)
def test_what_lies_beside_the_target_is_taken(method: str, tmp_path: Path) -> None:
    directory = tmp_path / FOLDERS[method]
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    found = with_shipped_drafter(speculating(method=["suffix", method], num_speculative_tokens=2), tmp_path)
    assert model_of(found) == str(directory)
    assert found.speculative is not None and found.speculative.num_tokens == 2


@pytest.mark.parametrize("method", FOLDERS)
def test_a_target_without_one_is_refused_with_the_fix(method: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"method {method} needs a model") as caught:
        with_shipped_drafter(speculating(method=method), tmp_path)
    assert str(tmp_path / FOLDERS[method]) in caught.value.message
    assert '"model"' in str(caught.value.hint) and caught.value.field == "speculative_config"


def test_a_model_that_is_named_and_methods_without_one_stay_as_they_are(tmp_path: Path) -> None:
    for config in (speculating(method="eagle", model="a/b"), speculating(method="suffix,mtp"), build_config()):
        assert with_shipped_drafter(config, tmp_path) is config


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"])
def test_the_embedded_model_has_its_own(method: str) -> None:
    config, _, _ = look_up(build_config(model="leaf", speculative_config={"method": method}))
    assert model_of(config) == str(resolve_model_path("leaf", None, None) / FOLDERS[method])
