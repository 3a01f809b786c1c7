"""Optimisers: Muon for hidden matrices, AdamW for embeddings and norms.

Muon (Jordan et al., 2024) keeps a momentum of the gradient and replaces it by
the nearest orthogonal matrix, found by a few Newton-Schulz steps. Called by
train.py. `Muon` owns the momentum buffers; AdamW is PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Calls a function for each of some values, perhaps in several threads.
Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
# Coefficients of the quintic a*x + b*x^3 + c*x^5 that drives singular values to ~1.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Returns a near-orthogonal matrix with the singular vectors of `g`.

    Args:
        g: Batch of matrices [batch, rows, cols]; products are in its type.
        steps: Number of Newton-Schulz steps.
    """
    a, b, c = NS_COEFFICIENTS
    x = g
    flip = x.shape[-2] > x.shape[-1]
    if flip:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    x = x.contiguous()
    for _ in range(steps):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.mT if flip else x


class Muon(torch.optim.Optimizer):
    """Momentum, Newton-Schulz orthogonalisation, decoupled weight decay.

    Args:
        params: Two-dimensional parameters (hidden matrices).
        lr: Step size; the update has singular values about 1 before it.
        momentum: Decay of the gradient average (Nesterov form).
        weight_decay: Decoupled decay per unit of lr.
        parts: Into how many parts the matrices of one shape are divided.
        run: Calls a function for each part, as `map` does.
        dtype: Of the Newton-Schulz products.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        parts: int = 1,
        run: Run = map,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.parts, self.run, self.dtype = parts, run, dtype

    def step(self) -> None:  # type: ignore[override]
        """Applies one update to every parameter that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            jobs = [some[i :: self.parts] for some in by_shape.values() for i in range(min(self.parts, len(some)))]
            for _ in self.run(lambda params, group=group: self._update(group, params), jobs):
                pass

    @torch.no_grad()
    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Updates matrices of one shape."""
        shape = params[0].shape
        updates = torch.empty(len(params), *shape, dtype=self.dtype, device=params[0].device)
        for p, update in zip(params, updates):
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            m = state["momentum"]
            m.lerp_(p.grad, 1 - group["momentum"])
            update.copy_(p.grad.lerp(m, group["momentum"]))
        scale = max(1.0, shape[0] / shape[1]) ** 0.5
        for p, u in zip(params, orthogonalise(updates)):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(u.to(p.dtype), alpha=-group["lr"] * scale)


def build_optimisers(
    model: nn.Module,
    lr_muon: float,
    lr_adam: float,
    weight_decay: float,
    parts: int = 1,
    run: Run = map,
    dtype: torch.dtype = torch.bfloat16,
) -> list[torch.optim.Optimizer]:
    """Splits the parameters: 2-D hidden matrices to Muon, whose last arguments these are, the rest to AdamW."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embeds = [p for n, p in model.named_parameters() if "embed" in n]
    norms = [p for n, p in model.named_parameters() if p.ndim == 1]
    adam = torch.optim.AdamW(
        [{"params": embeds, "lr": lr_adam}, {"params": norms, "lr": lr_adam}],
        betas=(0.9, 0.98),
        eps=1e-10,
        weight_decay=0.0,
        fused=True,
    )
    return [Muon(matrices, lr=lr_muon, weight_decay=weight_decay, parts=parts, run=run, dtype=dtype), adam]
