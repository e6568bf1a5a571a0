"""Scales of the latents in a cache of `fp8_per_tensor`, a random one in each layer: the logits of a float32 cache whose
rows are rounded as such a cache would give them back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3
from moe_engine.kernels.ops.protocol import OpsCapabilities, RotaryTable
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.loader import LoadOptions, load_model
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk, Stepper, make_backends

E4M3 = torch.float8_e4m3fn


class Rounding(TorchOps):
    """Rounds rows of caches in float32; `scales`: by the caches' addresses."""

    def __init__(self) -> None:
        self.scales: dict[int, float] = {}

    def write_latent(
        self, kv_a: Tensor, weight: Tensor, eps: float, positions: Tensor, table: RotaryTable, slots: Tensor,
        cache: Tensor, scale: float = 1.0,
    ) -> None:  # fmt: skip
        assert scale == 1.0
        super().write_latent(kv_a, weight, eps, positions, table, slots, cache)
        own = self.scales[cache.data_ptr()]
        rows = (cache[slots].double() / own).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
        cache[slots] = (rows.double() * own).to(cache.dtype)


class Absorbing(TorchOps):
    """With absorbed queries and cache rows in one call, as on a GPU."""

    @property
    def capabilities(self) -> OpsCapabilities:  # type: ignore[override]
        return OpsCapabilities(absorb=self.absorb)

    def absorb(
        self, q: Tensor, keys: Tensor, kv_a: Tensor, weight: Tensor, eps: float, positions: Tensor, table: RotaryTable,
        slots: Tensor, cache: Tensor, query_dtype: torch.dtype | None = None, scale: float = 1.0,
    ) -> Tensor:  # fmt: skip
        self.write_latent(kv_a, weight, eps, positions, table, slots, cache, scale)
        self.rotate(q, positions, table)
        nope = keys.shape[2]
        return torch.cat((torch.einsum("thn,hcn->thc", q[..., :nope], keys), q[..., nope:]), -1)


def absorbing(config: ModelConfig) -> Backends:
    return replace(make_backends(config), ops=Absorbing())


class Adapters:
    """`KVBAdapters` with the same adapter for all tokens."""

    def __init__(self, mla: MLAConfig) -> None:
        heads, rank = mla.num_heads, 3
        self.a = torch.randn(rank, mla.kv_lora_rank) * 0.1
        self.keys, self.values = (torch.randn(heads, rank, n) for n in (mla.qk_nope_head_dim, mla.v_head_dim))

    def add_to_query(self, latent: Tensor, q: Tensor, chunk: Any = None) -> None:
        latent += torch.einsum("thn,hrn,rc->thc", q, self.keys, self.a)

    def add_to_values(self, out: Tensor, mixed: Tensor, chunk: Any = None) -> None:
        out += torch.einsum("thc,rc,hrv->thv", mixed, self.a, self.values)

    def add_to_context(self, kv: Tensor, latent: Tensor, chunk: Any) -> None:
        both = torch.cat((self.keys, self.values), 2)
        kv += torch.einsum("sc,rc,hrn->shn", latent, self.a, both).flatten(1)


ROWS: dict[str, Callable[[ModelConfig], Backends]] = {
    "torch": make_backends, "cpu": lambda config: make_backends(config, "cpu"), "absorb": absorbing,
    "adapters": absorbing,
}  # fmt: skip


def stepper(path: Path, config: ModelConfig, backends: Backends, **options: Any) -> Stepper:
    return Stepper(load_model(path, config, LoadOptions("float32"), backends, **options), config, backends)


def logits_of(loaded: Stepper, tokens: list[int]) -> Tensor:
    """Prompts, a prompt beside a verification, and decodes."""
    found = loaded.step([Chunk(0, tokens[:30], False), Chunk(1, tokens[30:37], False)])
    found += loaded.step([Chunk(0, tokens[37:39], True), Chunk(1, tokens[39:44], False)])
    found += loaded.step([Chunk(0, tokens[44:45], True), Chunk(1, tokens[45:46], True)])
    return torch.cat(found)


@pytest.mark.each_value
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("max_expanded_tokens", [16384, 16])
@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2_lite"])
def test_logits_are_those_of_rounded_rows(kind: str, max_expanded_tokens: int, row: str, tmp_path: Path) -> None:
    dense = {"num_hidden_layers": 2, "first_k_dense_replace": 2}  # no router, whose choices last bits may change
    path = make_checkpoint(kind, tmp_path / "model", seed=random.randrange(2**31), tokenizer=False, **dense)
    config = load_model_config(path)
    scales = tuple(math.exp(random.uniform(math.log(0.03), math.log(8))) for _ in range(config.num_layers))
    rounding = Rounding()
    plain = stepper(path, config, replace(make_backends(config), ops=rounding))
    rounding.scales = {cache.data_ptr(): scale for cache, scale in zip(plain.kv, scales)}
    backends = ROWS[row](config)
    scaled = replace(config, latent_scales=scales)
    loaded = stepper(path, scaled, backends, max_expanded_tokens=max_expanded_tokens)
    loaded.kv = [cache.to(E4M3) for cache in loaded.kv]
    if row == "adapters":
        for layers in zip(plain.model.layers, loaded.model.layers):  # type: ignore[attr-defined]
            adapters = Adapters(layers[0].attention.mla)
            for layer in layers:
                layer.attention.adapters, layer.attention.kv_b_adapters = SimpleNamespace(active=True), adapters
    tokens = [random.randrange(256) for _ in range(46)]
    got, want = logits_of(loaded, tokens), logits_of(plain, tokens)
    # a number between two of e4m3 may be rounded to the other one where its last bit differs
    error = float((got - want).norm() / want.norm())
    assert error < 0.01, f"{error:.3g} with {scales}"
