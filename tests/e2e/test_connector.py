"""The example of docs/how-to/connectors.md, as written, with a model: the same bits, nothing computed twice."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.build import build_config
from quire.engine.config_lookup import resolve_config
from quire.engine.core import EngineCore
from quire.engine.core_factory import build_core
from quire.errors import ConfigError, UnsupportedError
from quire.platforms.detect import detect_platform
from quire.utils.phases import PhaseTimer
from tests.unit.scheduler.harness import make_request

BLOCK_SIZE, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 16, 70, 20
PROMPT = [(i * 37) % 900 + 5 for i in range(NUM_PROMPT_TOKENS)]
PAGE = Path(__file__).parents[2] / "docs/how-to/connectors.md"
MODULE = "example_of_connectors_md"


class Core:
    """An engine core; counts the tokens it computes, and what its connector does."""

    def __init__(self, **settings: Any) -> None:
        self.num_computed = 0
        self.counts: Counter[str] = Counter()
        platform = detect_platform("cpu")
        config = build_config(
            model="leaf", block_size=BLOCK_SIZE, max_model_len=256, num_gpu_blocks_override=40, **settings
        )
        config, _ = resolve_config(config, platform)
        self.core: EngineCore = build_core(config, platform, PhaseTimer(), on_step=self._count)

    def _count(self, num_tokens: int) -> None:
        self.num_computed += num_tokens

    def answer(self, handle: int, **params: Any) -> tuple[list[int], list[bytes], int]:
        """Tokens of `PROMPT`'s answer, bytes of their log-probabilities, and how many tokens were computed for it."""
        before = self.num_computed
        request = make_request(handle, PROMPT, max_tokens=NUM_OUTPUT_TOKENS, temperature=1.0, logprobs=3, **params)
        self.core.add_request(dataclasses.replace(request, seed=7))
        outputs = []
        while self.core.has_work():
            outputs += [one for one in [self.core.step()] if one is not None]
        for one in outputs:
            self.counts.update(one.stats.kv_connector or {})
        assert self.core.reset_prefix_cache(), "a block is lost"
        arrays = [one.logprobs.logprobs for one in outputs if one.logprobs is not None]
        logprobs = [array.tobytes() for array in arrays if array.size]
        return [token for one in outputs for token in one.new_token_ids], logprobs, self.num_computed - before


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page's connector as a module; its source."""
    source = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    directory = tmp_path_factory.mktemp("example")
    (directory / f"{MODULE}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        yield source


def connector(**more: Any) -> dict[str, Any]:
    return {"kv_connector": "DictConnector", "kv_connector_module_path": MODULE, **more}


def test_the_example_of_forty_lines_gives_the_same_bits_and_computes_no_block_twice(example):
    assert len([line for line in example.splitlines() if line.strip()]) <= 40
    core = Core(kv_transfer_config=connector())
    tokens, logprobs, num_computed = core.answer(0)
    assert num_computed == NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS - 1
    for handle in (1, 2):
        again, again_logprobs, num_again = core.answer(handle)
        assert again == tokens and again_logprobs == logprobs
        assert num_again == num_computed - NUM_PROMPT_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    salted, _, num_salted = core.answer(3, cache_salt="another tenant")
    assert salted == tokens and num_salted == num_computed
    core.core.shutdown()
    core.core.shutdown()
    plain = Core()
    assert plain.answer(0) == (tokens, logprobs, num_computed)
    plain.core.shutdown()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"kv_transfer_config": {"kv_connector": "Dict"}}, ConfigError, "kv_connector 'Dict' is not a known"),
        ({"kv_transfer_config": connector(kv_connector_extra_config={"a": 1})}, ConfigError, "has no key 'a'"),
        (
            {"kv_transfer_config": connector(), "enable_prefix_caching": False}, ConfigError,
            "kv_transfer_config needs enable_prefix_caching",
        ),
        (
            {"kv_transfer_config": connector(), "flight_recorder": "/nowhere"}, UnsupportedError,
            "cannot be combined with flight_recorder",
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_at_the_start(example, settings, error, message):
    with pytest.raises(error, match=message):
        Core(**settings)
