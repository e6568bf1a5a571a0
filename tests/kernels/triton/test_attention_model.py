"""A whole tiny model with Triton attention, under the interpreter: the tokens of the torch row in each step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_engine.kernels.queries import AttentionBatch
from moe_engine.models.config_file import load_model_config
from moe_engine.models.layers.attention import mla_chunks
from moe_engine.models.loader import LoadOptions, load_model
from tests.models.checkpoints import LARGE4, make_checkpoint
from tests.models.stepper import Chunk, Stepper, make_backends

triton_attention = pytest.importorskip("moe_engine.kernels.attention.triton.attention", reason="needs triton")

PROMPTS = {0: 9, 1: 5, 2: 26}
NUM_STEPS = 2


def greedy(path: Path, attention: object | None, **more: object) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of each step and all logits: chunked prompts beside decodes, then steps of one and of three tokens."""
    config = load_model_config(path)
    backends = make_backends(config, page_size=4)
    if attention is not None:
        backends = replace(backends, attention=attention, **more)
    model = load_model(path, config, LoadOptions("float32"), backends)
    stepper = Stepper(model, config, backends, page_size=4)
    generator = torch.Generator().manual_seed(3)
    prompts = {s: torch.randint(0, 256, (n,), generator=generator).tolist() for s, n in PROMPTS.items()}
    all_logits = stepper.step([Chunk(0, prompts[0], False), Chunk(1, prompts[1], False)])
    next_tokens = {s: int(logits[-1].argmax()) for s, logits in enumerate(all_logits)}
    late = stepper.step([Chunk(2, prompts[2][:20], False), *(Chunk(s, [t], True) for s, t in next_tokens.items())])
    late += stepper.step([Chunk(2, prompts[2][20:], False)])
    next_tokens = {0: int(late[1][-1].argmax()), 1: int(late[2][-1].argmax()), 2: int(late[3][-1].argmax())}
    all_logits += late
    tokens = [list(next_tokens.values())]
    for step in range(NUM_STEPS):
        drafts = [5, 9] if step % 2 else []  # a verification: three query tokens, causal among themselves
        chunks = [Chunk(s, [t, *drafts], True) for s, t in next_tokens.items()]
        logits = stepper.step(chunks)
        all_logits += logits
        next_tokens = {s: int(mine[-1].argmax()) for s, mine in zip(next_tokens, logits)}
        tokens.append(list(next_tokens.values()))
    return tokens, torch.cat(all_logits)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_moe", "mimo_v2_flash"])
def test_tokens_equal_those_of_the_torch_row(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(kind, tmp_path, seed=11)
    mla = load_model_config(path).attention.kind == "mla"
    make = triton_attention.TritonMLA if mla else triton_attention.TritonGQA
    tokens, logits = greedy(path, make(num_programs=5))
    expected_tokens, expected = greedy(path, None)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.exhaustive  # simulated_cuda/on_device has a whole engine with these kernels
@pytest.mark.parametrize("kind", ["deepseek_v32", LARGE4])
def test_a_sparse_model_equals_the_torch_rows(kind: str, tmp_path: Path) -> None:
    """Beyond its top-k: Triton indexer, and Triton attention over its selection. Mistral Large 4: also the operations
    before them, with layers of both kinds."""
    from moe_engine.kernels.indexer.triton_indexer import TritonIndexer
    from moe_engine.kernels.ops.triton_ops import TritonOps

    path = make_checkpoint(kind, tmp_path, seed=13, index_head_dim=16)
    expected_tokens, expected = greedy(path, None)
    rows = {"indexer": TritonIndexer()} | ({"ops": TritonOps()} if kind == LARGE4 else {})
    tokens, logits = greedy(path, triton_attention.TritonMLA(num_programs=5), **rows)
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_block_sparse_model_equals_the_torch_rows(tmp_path: Path) -> None:
    """MiniMax-M3 beyond its blocks: Triton indexer, and Triton attention over the slots of each KV head."""
    from moe_engine.kernels.block_index.triton_blocks import TritonBlockIndex

    own = {"sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 4, "sparse_topk_blocks": 2}
    sparse = own | {"sparse_attention_freq": [0, 1]}
    path = make_checkpoint(
        "minimax_m3", tmp_path, 13, num_hidden_layers=2, moe_layer_freq=[0, 0], sparse_attention_config=sparse
    )
    expected_tokens, expected = greedy(path, None)
    tokens, logits = greedy(path, triton_attention.TritonGQA(num_programs=5), block_index=TritonBlockIndex())
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_long_context_is_expanded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 8 tokens at once the prompts stay expanded, four tokens at a time: the same answers."""
    path = make_checkpoint("deepseek_v3", tmp_path, seed=12)
    expected_tokens, expected = greedy(path, None)
    whole, chunks = mla_chunks.cut, []

    def cut(batch: AttentionBatch, backend: object, plan: object, *more: object) -> list[mla_chunks.Piece]:
        chunks.extend(found := whole(batch, backend, plan, 8, 4, *more[2:]))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(mla_chunks, "cut", cut)
    tokens, logits = greedy(path, triton_attention.TritonMLA(num_programs=5))
    prefills = [chunk for chunk in chunks if chunk.queries.query_lens[0] > 3]
    assert prefills and not any(chunk.absorbed for chunk in prefills)
    assert max(len(chunk.context_chunks) for chunk in chunks) == 7  # of 26 tokens
    assert tokens == expected_tokens
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
