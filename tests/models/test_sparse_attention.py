"""Sparse attention of DeepSeek V3.2 and GLM-5: logits equal transformers' beyond the indexer's top-k, in every form of
a step; config.json and headers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.kernels.indexer import index_keys
from moe_engine.kernels.indexer.reference import TorchIndexer
from moe_engine.models import step_memory
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.header_check import check_headers
from moe_engine.models.tensors.model import model_tensors
from tests.models import sparse, stepper
from tests.models.checkpoints import SPARSE_KINDS, make_checkpoint
from tests.models.conftest import Oracle
from tests.models.rows import all_rows
from tests.models.stepper import Chunk
from tests.models.test_parity import assert_close, whole

MakeOracle = Callable[..., Oracle]
every_row = pytest.mark.parametrize("row", all_rows())
every_kind = pytest.mark.parametrize("kind", SPARSE_KINDS)


@every_row
@every_kind
def test_logits_equal_transformers(oracle: MakeOracle, kind: str, row: str) -> None:
    """A whole prompt; chunks below and beyond the top-k, decodes, several tokens of a decode."""
    want = oracle(kind)
    assert_close(whole(stepper.load(want.path, row), want.tokens), want.logits)
    model, tokens = stepper.load(want.path, row, seed=1, page_size=4), want.tokens
    assert_close(sparse.in_parts(model, tokens), want.logits)


@every_row
@every_kind
def test_mixed_batches(oracle: MakeOracle, kind: str, row: str) -> None:
    """Sequences below and beyond the top-k in one step, decodes and prompts."""
    want = oracle(kind)
    model, tokens = stepper.load(want.path, row, seed=2, max_expanded_tokens=16), want.tokens
    for got in model.run(tokens, sparse.MIXED_STEPS):
        assert_close(got, want.logits[: len(got)])


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared", "full"]}),
    ("glm_moe_dsa", {"index_topk_pattern": "FSFS"}),
    ("glm_moe_dsa", {"rms_norm_eps": 1e-2, "first_k_dense_replace": 2, "index_head_dim": 32}),
    ("deepseek_v32", {"index_head_dim": 8, "index_n_heads": 24, "index_topk": 33}),
    ("deepseek_v32", {"dialect": "transformers"}),
]


@pytest.mark.parametrize(("kind", "fields"), VARIANTS, ids=[str(fields) for _, fields in VARIANTS])
def test_variants(oracle: MakeOracle, kind: str, fields: dict[str, Any]) -> None:
    want = oracle(kind, seed=3, **fields)
    model = stepper.load(want.path, "torch", page_size=16)
    got = torch.cat((whole(model, want.tokens[:50]), whole(model, want.tokens[50:], decode=True)))
    assert_close(got, want.logits)


@every_kind
def test_a_context_within_the_top_k_is_dense(kind: str, tmp_path: Path) -> None:
    """Without a longer context, the indexer's weights have no effect."""
    path = make_checkpoint(kind, tmp_path / "model", index_topk=64, tokenizer=False)
    results = []
    for seed in (0, 1):
        model = stepper.load(path, "torch")
        for layer in model.model.layers:  # type: ignore[attr-defined]
            if layer.attention._indexer is not None and seed:
                layer.attention._indexer._norm_weight.normal_()
        results.append(model.step([Chunk(0, list(range(60)), False)])[0])
    assert torch.equal(*results)


def test_layers_that_share_a_selection_have_no_index_keys(tmp_path: Path) -> None:
    config = load_model_config(make_checkpoint("glm_moe_dsa", tmp_path / "model", tokenizer=False))
    assert isinstance(config.attention, MLAConfig) and config.attention.shared_layers == (2,)
    assert config.kv_bytes_per_token("bfloat16") == 2 * (4 * 40 + 3 * 16)
    names = [spec.name for spec in model_tensors(config)]
    assert sum(".indexer.wk." in name for name in names) == 3
    longer = replace(config, max_position_embeddings=1 << 20)
    assert step_memory.largest_step_activation_bytes(longer, 64, 2) > step_memory.MAX_INDEX_SCORES_BYTES


def with_fp8_keys(config: ModelConfig) -> ModelConfig:
    attention = config.attention
    assert isinstance(attention, MLAConfig) and attention.indexer is not None
    return replace(config, attention=replace(attention, indexer=replace(attention.indexer, fp8_keys=True)))


TILT = 2e-6
"""Relative to the largest value of a vector: more than the distance between the sums of two implementations."""


class Quantizes(TorchIndexer):
    """In caches of float32 the values that e4m3 records have, of keys and queries. All values before their rounding are
    larger by `tilt` of the largest one, weights of heads in turn larger and smaller."""

    def __init__(self, tilt: float = 0.0) -> None:
        self._tilt = tilt

    def write(self, keys: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor, page_size: int) -> None:
        super().write(self._rounded(keys), slots, cache, page_size)

    def select(self, q: torch.Tensor, weights: torch.Tensor, *others: Any) -> None:
        signs = 1 - 2 * (torch.arange(weights.shape[1]) % 2)
        super().select(self._rounded(q), weights * (1 + self._tilt * signs), *others)

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        turned = index_keys.hadamard(x)
        values, scales = index_keys.quantize(turned + self._tilt * turned.abs().amax(-1, keepdim=True))
        return values.float() * scales[..., None]


IN_PARTS = ((0, 6, False), (6, 50, False), (50, 51, True), (51, 80, False))


def in_parts(model: stepper.Stepper, tokens: list[int]) -> torch.Tensor:
    return torch.cat([whole(model, tokens[first:last], decode=decode) for first, last, decode in IN_PARTS])


def is_clear(path: Path, tokens: list[int], logits: torch.Tensor) -> bool:
    """Whether another order of sums decides nothing: no value is too near to the middle between two e4m3 values, and no
    selection to a tie."""
    tilted = (in_parts(stepper.load(path, indexer=Quantizes(tilt)), tokens) for tilt in (TILT, -TILT))
    return all(torch.allclose(one, logits, rtol=1e-4, atol=1e-5) for one in tilted)


@every_row
@every_kind
def test_index_keys_in_fp8_beside_latents(kind: str, row: str, sparse_paths: dict[str, Path]) -> None:
    """The tokens' logits are those of quantized keys in a cache of float32, in prompts and decodes."""
    path = sparse_paths[kind]
    found = stepper.load(path, row, page_size=4, change=with_fp8_keys)
    for _ in range(50):
        tokens = torch.randint(0, 256, (80,)).tolist()
        exact = stepper.load(path, seed=1, indexer=Quantizes())
        want, margin = sparse.with_margin(lambda: in_parts(exact, tokens))  # noqa: B023
        if margin > sparse.MARGIN and is_clear(path, tokens, want):  # the margin is that of routers
            break
    else:
        raise AssertionError("no clear prompt in 50 draws")
    width = found.config.attention.index_width
    assert found.kv[0][1].shape[1:] == (1, width // 4 + 1) and exact.kv[0][1].shape[1:] == (1, width)
    assert_close(in_parts(found, tokens), want)


@pytest.fixture(scope="module")
def sparse_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("fp8-keys")
    return {kind: make_checkpoint(kind, folder / kind, tokenizer=False) for kind in SPARSE_KINDS}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_head_dim": 24}, "index_head_dim must be a power of two"),
        ({"index_head_dim": 4}, "at least qk_rope_head_dim 8"),
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"index_topk": 0}, "index_topk must be at least 1"),
        ({"indexer_types": ["full", "other", "full"]}, "indexer_types needs 3 of"),
        ({"indexer_types": ["shared", "full", "full"]}, "layer 0 has no layer before it"),
        ({"index_topk_pattern": "FF"}, "index_topk_pattern needs 3 of"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types needs 3 of"),
    ],
)
def test_contradictions_in_the_config(fields: dict[str, Any], message: str, sparse_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_config(sparse_path, overrides=fields)


@pytest.fixture(scope="module")
def sparse_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v32", tmp_path_factory.mktemp("sparse") / "model", tokenizer=False)


def test_headers(sparse_path: Path) -> None:
    """Layers with an indexer have its tensors, layers that share a selection have none."""

    def check(**fields: Any) -> ModelConfig:
        config = load_model_config(sparse_path, overrides=fields)
        check_headers(sparse_path, read_checkpoint(sparse_path), config)
        return config

    check()
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.indexer.*belongs to no layer"):
        check(index_topk_pattern="FFS")
    with pytest.raises(CheckpointError, match=r"indexer\.wq_b\.weight.* has shape \[192, 24\], not \[96, 24\]"):
        check(index_n_heads=6)


def test_margins_are_seen(sparse_path: Path) -> None:
    """The oracle's prompts have no selection decided by rounding."""
    model = sparse.load(sparse_path)
    tokens, _ = sparse.reference_logits(sparse_path, 5, length=40)
    assert sparse.logits_of(model, tokens)[1] == 40
    margins: list[torch.Tensor] = []
    with sparse.observed(margins, 5):
        scores = torch.tensor([[[3.0, 2.0, 2.0, 2.0 - 1e-6, 1.0]]]).expand(1, 5, 5)
        assert scores.topk(2, dim=-1).indices[0, 0].tolist() == [0, 1] and scores.topk(3, dim=-1)
    assert margins[0][0].item() == 1.0 and 0 < margins[1][0].item() < sparse.MARGIN
