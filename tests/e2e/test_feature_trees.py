"""EAGLE heads draft trees: each path is what the head drafts along it alone; answers are those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import PreTrainedModel

from quire import LLM
from quire.core.draft_trees import MOST_TREES
from quire.core.model_drafts import DraftRequest, RowDrafts
from quire.core.scheduler_output import SchedulerOutput
from quire.executor.drafting import ModelProposer
from quire.models.heads.feature_head import FusedHead
from quire.worker.drafting.draft_step import DraftStep
from tests.e2e.test_draft_trees import SETTINGS, SMALL, Steps, answers
from tests.e2e.test_model_drafts import GREEDY, PROMPTS
from tests.models.checkpoints import make_checkpoint
from tests.models.heads import Reference, make_eagle, make_eagle3

AUX_LAYERS = (1, 2, 3)
TREE = "[(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 1, 0, 1)]"
PATHS = ((0, 0, 0), (0, 1, 0, 1), (1, 0, 0))
Make = Callable[[Path], Path]
HEADS: dict[str, Make] = {
    "eagle": make_eagle, "eagle3": lambda path: make_eagle3(path, aux_layers=AUX_LAYERS),
}  # fmt: skip
SMALL_HEADS: dict[str, Make] = {
    "eagle": lambda path: make_eagle(path, vocab_size=SMALL),
    "eagle3": lambda path: make_eagle3(path, aux_layers=AUX_LAYERS, draft_vocab_size=SMALL // 2, vocab_size=SMALL),
}


class Node(NamedTuple):
    """A draft: the tokens of its path and the probability of all of them."""

    path: tuple[int, ...]
    chance: float


class Drafts(NamedTuple):
    """A row's drafts, in order, and the token with which its context begins."""

    nodes: list[Node]
    first: int


Drafted = dict[tuple[int, ...], Drafts]
"""By all tokens of the row."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("target")
    return directory, make_checkpoint("llama", directory, num_hidden_layers=4, rms_norm_eps=1e-6)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of few tokens, so that random heads are right now and then."""
    directory = tmp_path_factory.mktemp("small")
    make_checkpoint("llama", directory, vocab_size=SMALL, num_hidden_layers=4, rms_norm_eps=1e-6)
    return directory


def paths_of(drafts: Drafts) -> list[tuple[int, ...]]:
    return [node.path for node in drafts.nodes]


def nodes_of(token_ids: np.ndarray, scores: np.ndarray, parents: np.ndarray) -> list[Node]:
    nodes = list[Node]()
    for token, chance, parent in zip(token_ids.tolist(), np.cumprod(scores).tolist(), parents.tolist(), strict=True):
        nodes.append(Node((*(nodes[parent].path if parent >= 0 else ()), token), chance))
    return nodes


def drafted(
    model: Path, method: str, head: Path, tree: str | None, rounds: int = 1, *, has_gaps: bool = False, **settings: Any
) -> Drafted:
    """What is drafted behind each sequence while some prompts are answered, of the last round; with gaps some steps
    are not asked for drafts.
    """
    found: Drafted = {}
    run, request, num_steps = DraftStep.run, ModelProposer.request, count()

    def asking(proposer: ModelProposer, scheduled: SchedulerOutput) -> DraftRequest | None:
        asked = request(proposer, scheduled)
        return None if has_gaps and next(num_steps) % 5 == 3 else asked

    def noting(step: DraftStep, *args: Any) -> RowDrafts:
        drafts = run(step, *args)
        ends = np.cumsum(drafts.counts)
        for row, length, start, end in zip(drafts.rows, drafts.num_tokens, ends - drafts.counts, ends, strict=True):
            chain = np.arange(-1, end - start - 1)
            parents = chain if drafts.parents is None else drafts.parents[start:end]
            tokens = tuple(step._requests.token_ids[row, :length].tolist())
            nodes = nodes_of(drafts.token_ids[start:end], drafts.scores[start:end], parents)
            passes = step._model._passes  # type: ignore[attr-defined]
            found[tokens] = Drafts(nodes, int(passes._first_slots[row] + passes._shifts[row]))
        return drafts

    config = {"method": method, "model": str(head), "enable_adaptive_verification": False}
    config |= {"num_speculative_tokens": 3} if tree is None else {"speculative_token_tree": tree}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftStep, "run", noting)
        patch.setattr(ModelProposer, "request", asking)
        with LLM(str(model), **{**SETTINGS, "dtype": "float32", **settings}, speculative_config=config) as llm:
            for _ in range(rounds):
                found.clear()
                llm.generate([{"prompt_token_ids": one} for one in PROMPTS], GREEDY, use_tqdm=False)
    return found


@pytest.mark.parametrize("method", list(HEADS))
def test_a_tree_is_what_a_slow_reference_drafts_along_each_path(method: str, target: Any, tmp_path: Path) -> None:
    """Of EAGLE-1 behind gaps as well, where slots are shifted."""
    directory, model = target
    reference = Reference.of(model, HEADS[method](tmp_path))
    found = drafted(directory, method, tmp_path, TREE, has_gaps=method == "eagle")
    num_paths = num_equal = num_shifted = 0
    for tokens, (nodes, first) in list(found.items())[::5]:
        chances = {node.path: node.chance for node in nodes}
        assert [*chances.values()] == sorted(chances.values(), reverse=True)
        if len(nodes) < 9:  # the row's blocks end
            continue
        for ranks in PATHS:
            more = (AUX_LAYERS,) if method == "eagle3" else ()
            drafts, scores = getattr(reference, method)(tokens, ranks, *more, first)
            num_shifted += first % SETTINGS["block_size"] > 0
            num_paths, num_equal = num_paths + 1, num_equal + (tuple(drafts) in chances)
            if tuple(drafts) in chances:
                np.testing.assert_allclose(chances[tuple(drafts)], np.prod(scores), rtol=5e-3)
    assert num_paths > 20 and num_equal >= num_paths - 2  # near ties
    assert method != "eagle" or num_shifted > 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_path_is_drafted_as_the_chain_of_its_ranks(dtype: str, target: Any, tmp_path: Path) -> None:
    """In a tree as alone, behind prompts from the prefix cache as well."""
    head, settings = make_eagle(tmp_path), {"dtype": dtype, "attention_backend": "native_cpu", "rounds": 2}
    of_tree = drafted(target[0], "eagle", head, TREE, **settings)
    chain = drafted(target[0], "eagle", head, None, **settings)
    for ranks in PATHS:
        alone = drafted(target[0], "eagle", head, str([ranks[: i + 1] for i in range(len(ranks))]), **settings)
        pairs = [(one.nodes, of_tree[tokens].nodes) for tokens, one in alone.items() if tokens in of_tree]
        full = [(nodes[-1], tree) for nodes, tree in pairs if len(nodes) == len(ranks) and len(tree) == 9]
        assert len(full) > 20
        for node, tree in full:
            (same,) = [one for one in tree if one.path == node.path]
            np.testing.assert_allclose(same.chance, node.chance, rtol=1e-5)
        if ranks == (0, 0, 0):
            common = alone.keys() & chain.keys()
            assert len(common) > 20
            assert all(paths_of(alone[tokens]) == paths_of(chain[tokens]) for tokens in common)


@pytest.mark.parametrize("method", list(SMALL_HEADS))
def test_trees_change_no_byte_and_more_drafts_stand_than_of_chains(
    method: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, steps = SMALL_HEADS[method](tmp_path), Steps(monkeypatch)
    plain = answers(small, None)
    assert answers(small, heads, tree=None, method=method) == plain
    of_chains, steps.num_accepted = steps.num_accepted, 0
    assert steps.num_trees == 0 < of_chains
    assert answers(small, heads, tree=TREE, method=method) == plain
    assert steps.num_trees > 10
    # EAGLE-3's has every second token alone.
    assert steps.num_accepted > (1.2 * of_chains if method == "eagle" else 0)


def test_a_level_is_one_pass_and_many_rows_draft_chains_no_longer_than_the_tree(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward, run = [0], FusedHead.forward, DraftStep.run
    passes = set[tuple[bool, int]]()  # whether trees were drafted, and passes of a step

    def counting(head: FusedHead, *args: Any) -> Any:
        calls[0] += 1
        return forward(head, *args)

    def noting(step: DraftStep, *args: Any) -> RowDrafts:
        calls[0] = 0
        drafts = run(step, *args)
        passes.add((drafts.parents is not None, calls[0]))
        return drafts

    monkeypatch.setattr(FusedHead, "forward", counting)
    monkeypatch.setattr(DraftStep, "run", noting)
    num_rows, head = MOST_TREES + 2, SMALL_HEADS["eagle"](tmp_path)
    found = answers(small, head, num_rows, TREE, "eagle", enforce_eager=True)
    assert found == answers(small, None, num_rows)
    assert max(one for is_tree, one in passes if is_tree) == max(one for is_tree, one in passes if not is_tree) == 4


def test_an_engine_for_one_request_and_short_chunks_have_room_for_trees(small: Path, tmp_path: Path) -> None:
    head = SMALL_HEADS["eagle"](tmp_path)
    for settings in (
        {"max_num_seqs": 1, "num_gpu_blocks_override": None, "max_model_len": 64, "count": 2},
        {"dtype": "bfloat16", "max_num_batched_tokens": 32, "attention_backend": "native_cpu"},
    ):
        assert answers(small, head, tree=TREE, method="eagle", **settings) == answers(small, None, **settings)
