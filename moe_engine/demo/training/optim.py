"""Muon for the matrices (orthogonalized momentum), AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(g: Tensor) -> Tensor:
    """Newton-Schulz iteration: g [n, rows, cols] with its singular values pushed towards one."""
    a, b, c = COEFFICIENTS
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = (x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(ITERATIONS):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized, scaled to the update size of AdamW. Stacked matrices [n, rows, cols] are n matrices."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update; matrices of one shape go through the iteration together."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[tuple[nn.Parameter, Tensor]]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                buf = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buf, group["momentum"])
                shapes[(p.shape[-2], p.shape[-1])].append((p, update.view(-1, p.shape[-2], p.shape[-1])))
            for (rows, cols), items in shapes.items():
                updates = orthogonalize(torch.cat([u for _, u in items])).split([len(u) for _, u in items])
                scale = group["lr"] * 0.2 * max(rows, cols) ** 0.5
                for (p, _), u in zip(items, updates):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(u.view_as(p), alpha=-scale)


def split(params: list[nn.Parameter], workers: int) -> list[list[nn.Parameter]]:
    """Distributes the matrices so that every worker has about the same orthogonalization work."""
    shares: list[list[nn.Parameter]] = [[] for _ in range(workers)]
    for p in sorted(params, key=lambda p: -p.numel()):
        min(shares, key=lambda share: sum(q.numel() for q in share)).append(p)
    return shares


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights for Muon: all matrices inside the layers except the routers'."""
    outside = ("embed_tokens.weight", "lm_head.weight", ".gate.weight")
    return [p for name, p in model.named_parameters() if p.ndim >= 2 and not name.endswith(outside)]


def make_optimizers(
    model: nn.Module, lr: float, shares: list[list[nn.Parameter]], rank: int
) -> list[torch.optim.Optimizer]:
    """AdamW for embedding, head, routers and norms (on every worker), Muon for this worker's share of the matrices."""
    inner = {id(p) for share in shares for p in share}
    rest = [p for p in model.parameters() if id(p) not in inner]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)
    return [adam, Muon(shares[rank], lr=lr, weight_decay=0.01)]
