"""In bfloat16 mixtures of experts here are as near to float32 as transformers' own, if all select the same experts.

Otherwise both sometimes select different experts: rounding reverses nearly equal scores, and attention passes the
difference to later tokens. On random weights a single difference may double the median error, in either engine, so
errors can be compared only with equal choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.models.config_file import load_model_config
from moe_engine.models.layers.feed_forward.moe import router_spec
from moe_engine.models.loader import LoadOptions, load_model
from tests.models.conftest import Oracle
from tests.models.stepper import Chunk, Stepper, make_backends


def weights_of(logits: Tensor, chosen: Tensor, spec: RouterSpec) -> Tensor:
    """Weights [T, K] of the experts `chosen` [T, K] by the formula of the family; logits [T, E] float32."""
    scores = logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(-1)
    weights = scores.gather(-1, chosen)
    return (weights / weights.sum(-1, keepdim=True) if spec.renormalize else weights) * spec.scale


@contextmanager
def before_experts(model: Any, change: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> Iterator[None]:
    """Calls change(gate, x, experts [T, K], weights [T, K]) before each layer's experts; may return other arguments."""
    modules = dict(model.named_modules())
    hooks = []
    for name, module in modules.items():
        if name.endswith("mlp.experts"):
            gate = modules[name.removesuffix("experts") + "gate"]
            hooks.append(module.register_forward_pre_hook(lambda _, args, gate=gate: change(gate, *args)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def transformers_model(path: Path, dtype: torch.dtype) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")


class ForcedOps:
    """A row of the ops table whose router takes given experts, one entry per layer."""

    def __init__(self, ops: Any, chosen: list[Tensor]) -> None:
        self._ops, self._chosen = ops, iter(chosen)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route(
        self, x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec, real: Tensor | None = None,
        experts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        chosen = next(self._chosen)
        weights = weights_of(x.float() @ gate.T, chosen, spec)
        shared = torch.arange(spec.num_experts, spec.num_experts + spec.num_shared).expand(len(x), -1)
        return F.pad(weights, (0, spec.num_shared), value=1.0), torch.cat((chosen, shared), 1).to(torch.int32)


def ours(path: Path, tokens: list[int], chosen: list[Tensor]) -> Tensor:
    config = load_model_config(path)
    backends = make_backends(config, "torch", "bfloat16")
    backends = dataclasses.replace(backends, ops=ForcedOps(backends.ops, chosen))
    model = load_model(path, config, LoadOptions("bfloat16"), backends)
    return Stepper(model, config, backends, torch.bfloat16).step([Chunk(0, tokens, False)])[0]


def theirs(path: Path, tokens: list[int], chosen: list[Tensor]) -> Tensor:
    config = load_model_config(path)
    assert config.moe is not None
    spec, layers = router_spec(config.moe), iter(chosen)

    def force(gate: Any, x: Tensor, experts: Tensor, weights: Tensor) -> Any:
        forced = next(layers)
        logits = x.reshape(-1, x.shape[-1]).float() @ gate.weight.float().T
        new = weights_of(logits, forced, spec).to(weights.dtype)
        return x, forced.reshape(experts.shape), new.reshape(weights.shape)

    model = transformers_model(path, torch.bfloat16)
    with before_experts(model, force):
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2", "qwen3_moe"])
@torch.no_grad()
def test_bfloat16_with_the_same_experts(oracle: Callable[..., Oracle], kind: str) -> None:
    want = oracle(kind)
    chosen: list[Tensor] = []
    plain = transformers_model(want.path, torch.float32)
    with before_experts(plain, lambda gate, x, experts, weights: chosen.append(experts.reshape(len(want.tokens), -1))):
        plain(torch.tensor([want.tokens]))
    assert chosen

    def error(logits: Tensor) -> float:
        return ((logits.float() - want.logits).norm(dim=-1) / want.logits.norm(dim=-1)).median().item()

    own, other = error(ours(want.path, want.tokens, chosen)), error(theirs(want.path, want.tokens, chosen))
    assert own < 1.25 * other, f"median error {own:.4f}, transformers' {other:.4f}"
    assert own < 0.03
