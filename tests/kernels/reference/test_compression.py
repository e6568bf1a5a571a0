"""Compression of every row that runs on a CPU against transformers' compressors of DeepSeek V4."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.kernels import tables
from moe_engine.kernels.compression.protocol import CompressedTokens, CompressorWeights, Kept
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.registry import Choice
from tests.models.rows import cpu_rows_of

ROWS = [row.name for row in cpu_rows_of(tables.COMPRESSION)]
NAN = float("nan")
KINDS = {
    "compressed_sparse_attention": "DeepseekV4CSACompressor",
    "heavily_compressed_attention": "DeepseekV4HCACompressor",
}
"""transformers' classes by the kind of their layer."""


def kernel(name: str) -> Any:
    row = next(row for row in tables.COMPRESSION if row.name == name)
    return Choice("compression", row, "").build()


class Case:
    """A compressor of transformers with random weights, and some requests."""

    def __init__(self, kind: str, rate: int, width: int, rotary: int, lens: list[int], dtype: torch.dtype) -> None:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as oracle  # imports triton

        rope = {"rope_theta": 10000.0, "partial_rotary_factor": rotary / width}
        yarn = rope | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        config = oracle.DeepseekV4Config(
            hidden_size=24, head_dim=width, num_attention_heads=2, q_lora_rank=8, num_hidden_layers=1,
            layer_types=[kind], compress_rates=dict.fromkeys(KINDS, rate), index_n_heads=2, index_head_dim=width,
            index_topk=2, rope_parameters={"main": rope | {"rope_type": "default"}, "compress": yarn},
            mlp_layer_types=["moe"], max_position_embeddings=256,
        )  # fmt: skip
        module = getattr(oracle, KINDS[kind])(config)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        self.rate, self.width, self.lens, self.dtype = rate, width, lens, dtype
        self.weights = CompressorWeights(module.position_bias.data, module.kv_norm.weight.data, 1e-6)
        cos, sin = module.rotary_emb(torch.ones(1), torch.arange(256)[None], layer_type="compress")
        self.table = RotaryTable(torch.cat((cos[0], sin[0]), -1), True)
        self.projected, self.entries = [], []
        with torch.no_grad():
            for count in lens:
                hidden = torch.randn(1, count, 24)
                projected = torch.cat((module.kv_proj(hidden), module.gate_proj(hidden)), -1)
                projected = projected.to(dtype).float()
                width_of = projected.shape[-1] // 2
                module.kv_proj.forward = lambda x, known=projected[..., :width_of]: known
                module.gate_proj.forward = lambda x, known=projected[..., width_of:]: known
                found, _ = module(hidden, torch.randn(1, count, 8), torch.arange(count)[None], None, 0)
                del module.kv_proj.forward, module.gate_proj.forward
                self.projected.append(projected[0])
                self.entries.append(found[0, 0])

    def run(self, row: Any, steps: list[list[int]]) -> list[Tensor]:
        """The entries of each request after steps of some tokens of each. Projections are kept in rings of a random
        size: of requests, or with two series of blocks. The kernel keeps them where no entry reads what it writes."""
        size, longest, channels = len(self.lens), max(self.lens), self.projected[0].shape[1]
        reach = self.weights.series * self.rate
        block = reach * random.randint(1, 3) if self.weights.series == 2 else 0
        each = reach + random.randint(0, (block or 9 + reach) - reach)
        blocks = -(-longest // block) if block else 1
        memory = torch.full(((1 + (size + 2) * blocks) * each, channels + 5), NAN, dtype=self.dtype)
        kept = Kept(memory[:, 2:-3], each, block)
        table, requests = torch.zeros(size + 2, longest, dtype=torch.int32), torch.randperm(size + 2)[:size].tolist()
        if block:
            own = torch.randperm(size * blocks).view(size, blocks, 1) * block + block + torch.arange(block)
            for request, slots in zip(requests, own.view(size, -1)):
                table[request] = slots[:longest]
        pages = -(-longest // self.rate)
        out = torch.full((pages * len(self.lens) + 1, self.width + 4), NAN, dtype=self.dtype)[:, 1:-3]
        pages_of = torch.randperm(pages * len(self.lens)).view(len(self.lens), pages)
        done = [0] * len(self.lens)
        for counts in steps:
            positions, starts, rows, slots = [0, 0], [0, 0], [0, 0], [0, 0]  # padding first
            projected = [torch.full((2, channels), NAN)]
            for i, count in enumerate(counts):
                begin, end = done[i], done[i] + count
                projected.append(self.projected[i][begin:end])
                starts += [begin] * count
                positions += range(begin, end)
                rows += [requests[i]] * count
                slots += [int(pages_of[i, p // self.rate]) * self.rate + p % self.rate for p in range(begin, end)]
                done[i] = end
            tokens = CompressedTokens(
                torch.tensor(positions), torch.tensor(starts), torch.tensor(rows, dtype=torch.int32), table,
                torch.tensor(slots),
            )  # fmt: skip
            strided = torch.full((len(positions), channels + 3), NAN, dtype=self.dtype)[:, 1:-2]
            strided.copy_(torch.cat(projected))
            places = kept.places(tokens.positions, tokens.rows, table[tokens.rows.long(), tokens.positions])
            places[:2] = 0
            if each == block or max(counts) <= each - reach + 1:
                row.compress(strided, kept, self.weights, self.table, tokens, out, places)
                assert torch.equal(kept.rows[places[2:]], strided[2:])
                continue
            before = memory.clone()
            row.compress(strided, kept, self.weights, self.table, tokens, out)
            assert torch.equal(memory.nan_to_num(), before.nan_to_num())
            for token, place in enumerate(places.tolist()[2:], 2):  # one after the other: a ring's last ones stay
                kept.rows[place] = strided[token]
        assert done == self.lens
        assert out.isnan().all(1).sum() == len(out) - sum(count // self.rate for count in self.lens)
        return [out[pages_of[i, : count // self.rate]] for i, count in enumerate(self.lens)]


SHAPES = [
    ("compressed_sparse_attention", 4, 32, 8),
    ("compressed_sparse_attention", 2, 20, 20),
    ("heavily_compressed_attention", 8, 48, 16),
    ("heavily_compressed_attention", 16, 512, 64),
]


def check(row: Any, dtype: torch.dtype, shape: tuple[str, int, int, int]) -> None:
    """Entries of requests in one step, and in steps that end inside of windows."""
    case = Case(*shape, [37, 5, 64], dtype)
    for steps in ([[37, 5, 64]], [[3, 1, 30], [9, 4, 2], [24, 0, 31], [1, 0, 1]]):
        for found, wanted in zip(case.run(row, steps), case.entries):
            bound = 2e-5 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(found.float(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_entries_equal_those_of_transformers(name: str, dtype: torch.dtype, shape: tuple[str, int, int, int]) -> None:
    check(kernel(name), dtype, shape)


@pytest.mark.parametrize("name", ROWS)
def test_an_entry_does_not_depend_on_the_step(name: str) -> None:
    case = Case("compressed_sparse_attention", 4, 64, 16, [40, 33], torch.bfloat16)
    state = torch.get_rng_state()
    alone = case.run(kernel(name), [[1, 0]] * 40 + [[0, 1]] * 33)
    torch.set_rng_state(state)
    together = case.run(kernel(name), [[40, 33]])
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("name", ROWS)
def test_steps_without_a_complete_window_write_nothing(name: str) -> None:
    case = Case("heavily_compressed_attention", 8, 32, 8, [7], torch.float32)
    (entries,) = case.run(kernel(name), [[3], [4], [0]])
    assert not len(entries)
