"""Tests of model, optimiser and trainer on a tiny network."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from training import tokenizer as tok
from training.data import Corpus
from training.evaluate import load_model
from training.export import export
from training.generate import generate_ids
from training.mixture import PHASES
from training.model import Leaf, LeafConfig
from training.muon import orthogonalise
from training.prepare import encode_part, jobs_of, write
from training.train import Settings, Trainer, schedule

TINY = LeafConfig(
    vocab_size=500,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=1024,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus")
    tok.save(tok.train_tokenizer(300, 500, seed=1), path)
    jobs = jobs_of(str(path / "tokenizer.json"), seed=1, tokens=24000, part=10000, longest=1024)
    write([encode_part(job) for job in jobs], path)
    return path


def _trainer(folder, steps, name="checkpoint", threads=1):
    settings = Settings(
        folder, batch_tokens=2048, max_steps=steps, model=TINY, log_every=1000, name=name, threads=threads
    )
    return Trainer(settings)


def test_batches_cover_the_corpus_once(folder):
    corpus = Corpus(folder)
    plan = corpus.plan(0, 0, 2048)
    docs = np.sort(np.concatenate(plan))
    assert (docs == np.arange(len(corpus.starts) - 1)).all()
    ids, targets, weights = corpus.batch(plan[0], "cpu")
    assert ids.shape == targets.shape == weights.shape
    assert {round(w, 3) for w in weights.unique().tolist()} <= {0.0, 0.1, 1.0}


def test_phases_follow_each_other_with_their_shares_of_tokens(folder):
    corpus = Corpus(folder)
    plan = corpus.plan(0, 0, 2048)
    phases = [int(corpus.phases[docs[0]]) for docs in plan]
    assert phases == sorted(phases) and all(len(set(corpus.phases[docs])) == 1 for docs in plan)
    lengths = np.diff(corpus.starts)
    shares = [lengths[corpus.phases == number].sum() / lengths.sum() for number in range(len(PHASES))]
    total = sum(phase.share for phase in PHASES)
    assert shares == pytest.approx([phase.share / total for phase in PHASES], abs=0.03)
    assert corpus.padded_tokens(plan) == sum(corpus.batch(docs, "cpu")[0].numel() for docs in plan)


@pytest.mark.parametrize("threads", [1, 2])
def test_resume_is_exact(folder, threads):
    straight = _trainer(folder, 6, f"resumed-{threads}", threads)
    straight.run()
    expected = {k: v.clone() for k, v in straight.model.state_dict().items()}
    straight.path.unlink()
    _trainer(folder, 3, f"resumed-{threads}", threads).run()
    resumed = _trainer(folder, 6, f"resumed-{threads}", threads)
    assert resumed.step == 3
    resumed.run()
    assert resumed.tokens == resumed.corpus.padded_tokens(resumed.plan[:6])  # the schedule of any number of threads
    for name, value in resumed.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("threads", [2, 3])
def test_parts_of_a_batch_give_the_gradient_and_the_update_of_the_whole(folder, threads):
    whole, parts = _trainer(folder, 1, "whole"), _trainer(folder, 1, "parts", threads)
    docs = next(d for d in whole.plan if len(d) > 2)
    whole._gradients(docs)
    parts._gradients(docs)
    for (name, p), other in zip(whole.model.named_parameters(), parts.model.parameters()):
        assert (p.grad - other.grad).norm() < 0.02 * p.grad.norm(), name
        other.grad = p.grad.clone()
    for trainer in (whole, parts):
        for optimiser in trainer.optimisers:
            optimiser.step()
    for (name, p), other in zip(whole.model.named_parameters(), parts.model.parameters()):
        torch.testing.assert_close(p, other, rtol=0, atol=1e-4, msg=name)
    counted = [sum(row[1] for row in trainer.sums.values()) for trainer in (whole, parts)]
    assert counted[0] == counted[1] > 0


def test_a_run_that_was_killed_between_two_checkpoints_repeats_the_steps_since(folder):
    straight, killed = (_trainer(folder, 5, name) for name in ("straight", "killed"))
    straight.run()
    for _ in range(2):
        killed.train_step()
    killed.save()
    killed.train_step()  # and no more
    resumed = _trainer(folder, 5, "killed")
    assert resumed.step == 2
    resumed.run()
    expected = straight.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())


def test_export_and_reload(folder, tmp_path):
    trainer = _trainer(folder, 1)
    trainer.save()
    assert export(folder, tmp_path / "leaf") < 20 * 2**20
    model = load_model(None, tmp_path / "leaf")
    names = set(model.state_dict())
    assert "model.layers.1.self_attn.q_norm.weight" in names and "lm_head.weight" not in names
    assert model.config == TINY


def test_the_model_is_the_mean_of_the_weights_at_the_ends_of_cycles(folder, tmp_path):
    trainer = Trainer(Settings(folder, batch_tokens=2048, model=TINY, cycles=(0, 2)))
    of_first = [docs for docs in trainer.plan if trainer.corpus.phases[docs[0]] < 2]
    trainer.index, trainer.tokens = len(of_first) - 1, trainer.corpus.padded_tokens(of_first[:-1])
    trainer.train_step()
    first = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train_step()
    trainer.save()
    last = trainer.model.state_dict()
    assert not torch.equal(first["model.norm.weight"], last["model.norm.weight"])
    export(folder, tmp_path / "leaf", shares=(0.25, 0.75))
    for name, weight in load_model(None, tmp_path / "leaf").state_dict().items():
        torch.testing.assert_close(weight, (0.25 * first[name] + 0.75 * last[name]).bfloat16().float())


def test_padding_does_not_change_answers():
    model = Leaf(TINY).eval()
    prompts = [[5, 6, 7, 8, 9], [10, 11], [12]]
    together = generate_ids(model, prompts, 5)
    assert together == [generate_ids(model, [p], 5)[0] for p in prompts]


def test_muon_update_is_nearly_orthogonal():
    g = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(g).float())
    assert values.min() > 0.5 and values.max() < 1.4


def test_each_cycle_of_step_sizes_ends_at_nothing(folder):
    settings = Settings(folder, batch_tokens=2048, model=TINY, cycles=(0, 2), name="cycles")
    trainer = Trainer(settings)
    first, second = trainer.cycles
    assert first.begin == 0 and first.end == second.begin and second.end == trainer.total
    tokens = [trainer.corpus.padded_tokens([docs]) for docs in trainer.plan]
    is_first = [trainer.corpus.phases[docs[0]] < 2 for docs in trainer.plan]
    assert first.end == sum(count for count, is_of_it in zip(tokens, is_first) if is_of_it)
    sizes = []
    for count in tokens:
        sizes.append(trainer.step_size())
        trainer.tokens += count
    of_first = [size for size, is_of_it in zip(sizes, is_first) if is_of_it]
    of_second = [size for size, is_of_it in zip(sizes, is_first) if not is_of_it]
    assert max(of_first) == max(of_second) == 1.0
    assert of_first[-1] < 0.2 > of_second[-1]


def test_schedule_rises_and_falls():
    assert schedule(0.0, 0.01) < 0.1
    assert schedule(0.2, 0.01) == 1.0
    assert schedule(1.0, 0.01) == 0.0
