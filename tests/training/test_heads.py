"""Tests of the speculation heads' training on a tiny target: a few steps of each, export, counting of drafts."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training import tokenizer as tok
from training.data import Corpus
from training.export import COPIED, digest, hf_config
from training.heads import distill
from training.heads.acceptance import acceptance, eagle_drafts, standing
from training.heads.build import check_target
from training.heads.eagle import EagleHead
from training.heads.export import HEADING, export, heads_section, read_head, update_readme
from training.heads.train import DEPTHS, MEDUSA_HEADS, TRAINERS, settings_of
from training.model import Leaf, LeafConfig

TINY = LeafConfig(
    vocab_size=500,
    hidden_size=128,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=1024,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random model with a small tokenizer, as an exported folder."""
    path = tmp_path_factory.mktemp("target")
    tok.save(tok.train_tokenizer(200, 500, seed=1), path)
    weights = {k: v.to(torch.bfloat16) for k, v in Leaf(TINY, seed=3).state_dict().items()}
    save_file(weights, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(hf_config(TINY)))
    (path / "README.md").write_text("# tiny\n")
    return path


@pytest.fixture(scope="module")
def build(tmp_path_factory, target):
    """Training and measuring sets whose answers are a fixed run of tokens."""
    path = tmp_path_factory.mktemp("heads")
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    model = distill.load_model(None, target)
    prompts = distill.training_prompts(tokenizer, 24, seed=1)
    answers = [[20 + (i + j) % 7 for j in range(3 + i % 9)] for i in range(len(prompts))]
    for name in ("train", "greedy", "sampled"):
        distill.write(path / name, prompts, answers, model)
    return path


def _train(kind: str, build, target, steps: int):
    settings = replace(settings_of(kind, build / "train", max_steps=steps), log_every=1000, batch_tokens=1024)
    trainer = TRAINERS[kind](settings, distill.load_model(None, target))
    trainer.run()
    return trainer


@pytest.fixture(scope="module")
def heads(build, target, tmp_path_factory):
    """Each head after three steps without a stop: its weights as trained, its exported folder and its card."""
    made = {}
    for kind in TRAINERS:
        trainer = _train(kind, build, target, 3)
        weights = {k: v.clone() for k, v in trainer.model.state_dict().items()}
        folder = tmp_path_factory.mktemp(kind)
        made[kind] = weights, folder, export(kind, build, target, folder)
        trainer.path.unlink()
    return made


@pytest.mark.parametrize("kind", list(TRAINERS))
def test_a_head_that_was_stopped_and_resumed_has_the_weights_of_one_that_was_not(kind, heads, build, target):
    _train(kind, build, target, 1)
    resumed = _train(kind, build, target, 3)
    weights = resumed.model.state_dict()
    assert weights.keys() == heads[kind][0].keys()
    assert all(torch.equal(v, heads[kind][0][k]) for k, v in weights.items())


@pytest.mark.parametrize("kind", list(TRAINERS))
def test_an_exported_head_has_its_card_and_can_be_read(kind, heads, target):
    weights, folder, card = heads[kind]
    assert card["digest"] == digest(folder / "model.safetensors")
    assert json.loads((folder / "card.json").read_text()) == card
    assert len(card["acceptance"]["greedy"]["all tasks"]["stand_by_position"]) == DEPTHS[kind]
    head, _ = read_head(kind, folder, distill.load_model(None, target))
    assert sum(p.numel() for p in head.parameters()) == card["parameters"]
    assert all(torch.equal(p, weights[k].to(torch.bfloat16).float()) for k, p in head.named_parameters())


def test_names_are_those_of_published_checkpoints(heads):
    names = {kind: set(load_file(heads[kind][1] / "model.safetensors")) for kind in TRAINERS}
    layer = "layers.0."
    assert names["eagle"] == {
        "fc.weight",
        f"{layer}post_attention_layernorm.weight",
        *(f"{layer}self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"{layer}mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    }
    assert names["medusa"] == {f"medusa_head.{i}.0.linear.{x}" for i in range(MEDUSA_HEADS) for x in ("weight", "bias")}
    assert "model.embed_tokens.weight" in names["draft"]
    assert all((heads["draft"][1] / name).exists() for name in (*COPIED, "config.json"))


def test_passes_are_what_drafting_one_token_at_a_time_computes():
    """The batched passes give the states that a head gives that is fed its own estimates, place by place."""
    head, generator = EagleHead(TINY, seed=1), torch.Generator().manual_seed(0)
    embeddings = torch.randn(1, 9, TINY.hidden_size, generator=generator)
    hidden = torch.randn(1, 9, TINY.hidden_size, generator=generator)
    with torch.inference_mode():
        batched = head.passes(embeddings, hidden, 3)
        for anchor in range(6):
            known = hidden[:, : anchor + 1]
            for p in range(3):
                # True states up to the anchor, estimates after it: one plain causal pass over them.
                state = head.passes(embeddings[:, : anchor + 1 + p], known, 1)[0][:, -1:]
                torch.testing.assert_close(batched[p][:, anchor + p], state[:, 0], rtol=1e-4, atol=1e-4)
                known = torch.cat((known, state), 1)


def test_a_head_that_is_right_stands_everywhere_and_one_that_is_wrong_nowhere(build):
    def right(ids, hidden, depth):
        return torch.stack([F.pad(ids[:, 2 + j :], (0, 2 + j)) for j in range(depth)], 1)

    found = standing(build / "greedy", right, 4)
    assert all((counts == np.minimum(np.arange(len(counts), 0, -1), 4)).all() for _, counts in found)
    figures = acceptance(build / "greedy", right, 4)["all tasks"]
    assert figures["stand_by_position"] == [1.0] * 4 and figures["tokens_per_step"] > 3
    wrong = acceptance(build / "greedy", lambda *given: right(*given) + 1, 4)["all tasks"]
    assert wrong["stand_by_position"] == [0.0] * 4 and wrong["tokens_per_step"] == 1.0
    assert len(found) == len(Corpus(build / "greedy").tasks)
    assert {len(counts) + 1 for _, counts in found} <= set(range(3, 12))


def test_the_first_drafts_of_an_eagle_head_follow_from_true_states_alone(build, target):
    model = distill.load_model(None, target)
    head = EagleHead(TINY)
    ids = torch.arange(20, 40)[None]
    hidden = model.hidden(ids)
    one, three = (eagle_drafts(head, model.model.embed_tokens.weight)(ids, hidden, d) for d in (1, 3))
    assert torch.equal(one[:, 0], three[:, 0])


def test_the_card_gets_one_section_however_often_it_is_written(heads, tmp_path):
    cards = [heads[kind][2] for kind in TRAINERS]
    readme = tmp_path / "README.md"
    readme.write_text("# tiny\n\nText.\n")
    for _ in range(2):
        update_readme(readme, heads_section(cards))
    assert readme.read_text().count(HEADING) == 1 and readme.read_text().startswith("# tiny\n\nText.\n")


def test_answers_that_were_given_before_a_run_was_cut_off_are_kept(tmp_path, monkeypatch):
    prompts = [distill.Prompt("tales", [i, i + 1], [False, False]) for i in range(5)]
    asked = []

    def answer(ids, temperatures, seeds):
        asked.append((seeds, temperatures))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return [[one[0], seed] for one, seed in zip(ids, seeds)]

    monkeypatch.setattr(distill, "PART", 2)
    temperatures = [0.0, 0.7, 1.0, 0.0, 0.7]
    with pytest.raises(KeyboardInterrupt):
        distill.kept_answers(answer, tmp_path / "train", prompts, temperatures)
    found = distill.kept_answers(answer, tmp_path / "train", prompts, temperatures)
    assert found == [[i, i] for i in range(5)]
    assert asked == [([0, 1], [0.0, 0.7]), ([2, 3], [1.0, 0.0]), ([2, 3], [1.0, 0.0]), ([4], [0.7])]


def test_answers_of_another_target_are_not_mixed_in(target, tmp_path):
    check_target(tmp_path, target)
    check_target(tmp_path, target)
    (tmp_path / "target").write_text("another")
    with pytest.raises(SystemExit, match="answers of another model"):
        check_target(tmp_path, target)
