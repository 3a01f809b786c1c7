"""What a training step computes is what the plain model computes, up to rounding: losses, gradients, updates."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from training import fused
from training.model import Leaf, LeafConfig
from training.muon import NS_COEFFICIENTS, orthogonalise

SMALL = LeafConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=1024,
)


@pytest.fixture
def model():
    """Random weights whose gains are not all 1."""
    made, generator = Leaf(SMALL, seed=3), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    return made


@pytest.fixture
def batch():
    """Token ids and targets [4, 160], loss weights of which some are 0 at the right."""
    generator = torch.Generator().manual_seed(2)
    ids, targets = (torch.randint(0, SMALL.vocab_size, (4, 160), generator=generator) for _ in range(2))
    weights = torch.where(torch.rand(4, 160, generator=generator) < 0.5, 1.0, 0.1)
    weights[1, 100:] = 0.0
    return ids, targets, weights


def _plain(model, ids, targets, weights):
    logits = model.logits(model.hidden(ids)).float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return (losses * weights).sum() / weights.sum()


def _fused(model, ids, targets, weights):
    hidden = model.train_hidden(ids)
    return fused.cross_entropy(hidden, model.model.embed_tokens.weight.to(hidden.dtype), targets, weights)[0]


def _gradients(loss, model, batch, bf16):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        value = loss(model, *batch)
    value.backward()
    return value.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def _distances(found, wanted):
    return {name: float((found[name] - g).norm() / g.norm()) for name, g in wanted.items()}


def test_losses_and_gradients_are_those_of_the_plain_model(model, batch):
    wanted, wanted_gradients = _gradients(_plain, model, batch, False)
    found, gradients = _gradients(_fused, model, batch, False)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert max(_distances(gradients, wanted_gradients).values()) < 1e-4


def test_in_bfloat16_gradients_are_as_near_to_the_exact_ones_as_those_of_the_plain_model(model, batch):
    wanted, exact = _gradients(_plain, model, batch, False)
    _, plain = _gradients(_plain, model, batch, True)
    found, gradients = _gradients(_fused, model, batch, True)
    assert found == pytest.approx(wanted, abs=5e-3)
    ours, theirs = _distances(gradients, exact), _distances(plain, exact)
    assert sum(ours.values()) < 1.2 * sum(theirs.values()) and max(ours.values()) < 0.1


def test_losses_of_tokens_are_cross_entropies_even_of_a_token_that_is_nearly_impossible():
    hidden = torch.eye(3) * torch.tensor([1.0, 20.0, 60.0])
    targets, weights = torch.tensor([1, 1, 0]), torch.tensor([1.0, 0.1, 1.0])
    _, losses = fused.cross_entropy(hidden, torch.eye(3), targets, weights)
    torch.testing.assert_close(losses, F.cross_entropy(hidden, targets, reduction="none"))


def test_cross_entropy_with_distributions_has_the_gradient_of_the_formula():
    generator = torch.Generator().manual_seed(4)
    given = torch.randn(200, 50, generator=generator).requires_grad_()
    wanted, weights = torch.randn(200, 50, generator=generator).softmax(-1), torch.rand(200, generator=generator)
    found, formula = fused.soft_cross_entropy(given, wanted), -(wanted * given.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(found, formula)
    gradients = [torch.autograd.grad((losses * weights).sum(), given)[0] for losses in (found, formula)]
    torch.testing.assert_close(*gradients)


def test_orthogonalise_is_the_written_down_polynomial():
    g = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(0))
    a, b, c = NS_COEFFICIENTS
    x = g / g.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    torch.testing.assert_close(orthogonalise(g), x)
    assert (orthogonalise(g.bfloat16()).float() - x).norm() < 0.03 * x.norm()
    torch.testing.assert_close(orthogonalise(g.mT), orthogonalise(g).mT)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_memory_that_was_released_is_used_again_without_page_faults():
    code = (
        "import resource; from training.memory import keep_freed_memory; keep_freed_memory()\n"
        "for i in range(9):\n"
        "    if i == 1: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    bytearray(64 << 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    faults = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert faults * resource.getpagesize() < 32 << 20
