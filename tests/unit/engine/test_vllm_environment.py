from __future__ import annotations

import logging

import pytest

from quire import envs
from quire.cli.collect_env import _as_text
from quire.config.build import build_config
from quire.config.server import ApiConfig
from quire.engine.vllm_environment import INSTEAD, USED, warn_of_vllm_environment, with_vllm_environment
from quire.errors import ConfigError
from quire.logger import configure_logging
from quire.server.http.keys import read_api_keys


def test_a_key_in_vllms_variable_protects_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "a-key-by-habit")
    assert read_api_keys(ApiConfig()).tenant_of(b"Bearer a-key-by-habit") is not None
    monkeypatch.setenv("QUIRE_API_KEY", "another-key")
    keys = read_api_keys(ApiConfig(api_key=("third-key",)))
    for key in (b"a-key-by-habit", b"another-key", b"third-key"):
        assert keys.tenant_of(b"Bearer " + key) is not None
    assert keys.tenant_of(b"Bearer none") is None and envs.api_key() == "another-key"


def test_variables_are_named_in_the_log_and_none_is_ignored_silently(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    monkeypatch.setenv("VLLM_HOST_IP", "0.0.0.0")
    monkeypatch.setenv("VLLM_USE_V1", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setenv("VLLM_API_KEY", "secret-of-mine")
    with caplog.at_level("WARNING", "quire"):
        warn_of_vllm_environment()
    assert [record.getMessage() for record in caplog.records] == [
        "VLLM_HOST_IP has no effect: use --host",
        "no effect in Quire: VLLM_USE_V1, VLLM_WORKER_MULTIPROC_METHOD",
    ]
    assert not set(INSTEAD) & set(USED)


def test_the_memory_of_the_cache_may_come_from_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    assert with_vllm_environment(build_config())[0].cache.kv_cache_memory_bytes == 3 << 29
    given = build_config(kv_cache_memory_bytes=1 << 20)
    assert with_vllm_environment(given) == (given, [])
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "much")
    with pytest.raises(ConfigError, match="VLLM_CPU_KVCACHE_SPACE='much' is not a number of GiB"):
        with_vllm_environment(build_config())


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("QUIRE_LOG_LEVEL", "debg", "did you mean DEBUG?"),
        ("QUIRE_LOG_LEVEL", "5", "use one of DEBUG"),
        ("VLLM_LOGGING_LEVEL", "loud", "use one of DEBUG"),
        ("QUIRE_LOG_FORMAT", "xml", "use one of text, json"),
    ],
)
def test_a_wrong_level_or_format_of_the_log_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, hint: str
) -> None:
    monkeypatch.delenv("QUIRE_LOG_LEVEL", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}=.*is not one of") as caught:
        configure_logging()
    assert hint in str(caught.value)


def test_the_level_of_the_log_may_come_from_vllms_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_LOG_LEVEL", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "warning")
    assert envs.log_level() == "WARNING"


def test_a_variable_that_is_not_set_is_not_said_to_be_uninstalled() -> None:
    assert _as_text({"OMP_NUM_THREADS": None, "triton": None}) == "OMP_NUM_THREADS not set, triton not installed"
