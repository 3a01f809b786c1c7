from __future__ import annotations

import pytest

from quire.config.speculative import SpeculativeConfig
from quire.config.token_tree import MAX_PATHS, parse_tree
from quire.errors import ConfigError


def test_paths_are_read_in_vllms_spelling_and_sorted() -> None:
    expected = ((0,), (1,), (0, 0), (0, 1), (0, 1, 2))
    assert parse_tree("[(0,), (0, 0), (0, 1), (0, 1, 2), (1,)]") == expected
    assert parse_tree("[[0],[0,0],[0,1],[0,1,2],[1]]") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a list of paths"),
        ("(0,)", "not a list of paths"),
        ("[(0,)", "not a list of paths"),
        ("[0]", "not a list of paths"),
        ("[(-1,)]", "not a list of paths"),
        ("__import__('os')", "not a list of paths"),
        ("[" * 4000, "not a list of paths"),
        ("[(0,), " * 900, "not a list of paths"),
        ("[]", "0 paths"),
        ("[(0,), (0,)]", "one twice"),
        ("[()]", "the path ()"),
        ("[(99,)]", "the path (99,)"),
        ("[(0,), (1, 0)]", "the path (1, 0) without (1,)"),
        (str([(i // 8, i % 8) for i in range(MAX_PATHS + 1)]), "65 paths"),
    ],
)
def test_what_is_no_tree_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tree(text)
    assert message in caught.value.message and caught.value.hint and caught.value.field == "speculative_config"


def test_a_tree_decides_how_many_drafts_there_are() -> None:
    config = SpeculativeConfig(method=("medusa",), model="m", speculative_token_tree="[(0,), (1,), (0, 0)]")
    assert config.num_tokens == 3 and config.tree == ((0,), (1,), (0, 0))
    chained = SpeculativeConfig(method=("suffix", "medusa"), model="m", speculative_token_tree="[(0,), (1,)]")
    assert chained.num_tokens == 24
    assert SpeculativeConfig(method=("medusa",), model="m").tree == ()
    of_head = SpeculativeConfig(
        method=("eagle3",), model="m", speculative_token_tree="[(0,), (1,), (0, 0), (0, 1), (1, 0)]"
    )
    assert of_head.num_tokens == 5


@pytest.mark.parametrize(
    "more", [{"method": ("ngram",)}, {"method": ("draft_model",), "model": "m"}, {"acceptance": "rejection"}]
)
def test_trees_are_of_heads_and_sampled_verification(more: dict[str, object]) -> None:
    fields = {"method": ("medusa",), "model": "m", "speculative_token_tree": "[(0,)]", **more}
    if more.get("method") == ("ngram",):
        del fields["model"]
    with pytest.raises(ConfigError, match="of methods eagle, eagle3, medusa and of acceptance sampled"):
        SpeculativeConfig(**fields)  # type: ignore[arg-type]
