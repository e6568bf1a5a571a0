"""Bytes that a rank reads and sends, without other processes: a rank's model with simulated peers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moe_engine.models import registry
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.config_file import load_model_config
from moe_engine.models.sharding import local_config
from moe_engine.models.weights import WeightReader
from moe_engine.parallel.context import SINGLE, ParallelContext
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.topology import Topology
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk, Stepper, make_backends

FP8 = {
    "hidden_size": 256, "intermediate_size": 1024, "moe_intermediate_size": 256, "kv_lora_rank": 128,
    "q_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8,
    "num_hidden_layers": 2, "fp8": True,
}  # fmt: skip


class Imagined:
    """A `Group` whose other ranks return this rank's values; records the calls."""

    timeout_s = 1.0
    device = torch.device("cpu")

    def __init__(self, name: str, rank: int, size: int, calls: list[str]) -> None:
        self.rank, self.size = rank, size
        self._name, self._calls = name, calls

    def _note(self, operation: str) -> None:
        assert self.size > 1, f"{self._name} has one rank and need not {operation}"
        self._calls.append(f"{self._name} {operation}")

    def all_reduce(self, x: Tensor) -> Tensor:
        self._note("all_reduce")
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self._note("all_gather")
        return x.unsqueeze(0).repeat(self.size, *[1] * x.dim())

    def reduce_scatter(self, x: Tensor) -> Tensor:
        self._note("reduce_scatter")
        assert x.shape[0] == self.size
        return x[self.rank].clone()

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        self._note("all_to_all")
        assert out_rows is not None and x_rows is not None
        assert (sum(out_rows), sum(x_rows)) == (len(out), len(x)) and len(out_rows) == len(x_rows) == self.size
        out.zero_()


class ImaginedDispatcher:
    """Has the attributes that a layer reads during construction; sends nothing."""

    def takes_rows(self) -> dict[str, bool]:
        return dict.fromkeys(get_args(Phase), False)


def imagine(topology: Topology, rank: int, calls: list[str]) -> ParallelContext:
    sizes = {
        "world": (rank, topology.tp_size),
        "attn_tp": (topology.attn_tp_rank(rank), topology.attn_tp_size),
        "moe_tp": (rank % topology.moe_tp_size, topology.moe_tp_size),
        "ep": (topology.ep_rank(rank), topology.ep_size),
    }
    groups: dict[str, Any] = {name: Imagined(name, *place, calls) for name, place in sizes.items()}
    dispatcher: Any = ImaginedDispatcher() if topology.travels else None
    return ParallelContext(topology, rank, dispatcher=dispatcher, **groups)


def load(path: Path, parallel: ParallelContext) -> tuple[Any, WeightReader]:
    config = load_model_config(path)
    reader = WeightReader(path, torch.float32)
    model = registry.find([config.architecture]).model_class()(config, reader, make_backends(config), parallel)
    reader.finish()
    return model, reader


# the part of a tensor that a rank reads, by letter: column parallel (c), row parallel (r), expert (e)
COLUMN = ("q_proj", "q_b_proj", "kv_b_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
ATTENTION = ("q_proj", "q_b_proj", "kv_b_proj", "k_proj", "v_proj", "o_proj")


def expected_bytes(path: Path, t: Topology, rank: int) -> int:
    """Bytes by the definition of each axis; all widths divide evenly."""
    total = 0
    for name, file in read_checkpoint(path).items():
        size, part = file.tensors[name].num_bytes, name.split(".")
        projection = part[-2]
        if name.endswith("_scale_inv"):
            ours = ".experts." not in name or _holds(int(part[part.index("experts") + 1]), t, rank)
            total += size if ours else 0  # a scale grid is read completely
        elif ".experts." in name:
            total += size // t.moe_tp_size if _holds(int(part[part.index("experts") + 1]), t, rank) else 0
        elif projection in ATTENTION or projection == "embed_tokens":
            total += size // t.attn_tp_size
        elif ".shared_experts." in name:
            total += size if t.travels else size // t.tp_size
        elif projection in (*COLUMN, *ROW):
            total += size if t.moe_dense_tp_size == 1 else size // t.tp_size
        elif projection == "lm_head":
            total += size // (t.attn_tp_size if t.enable_dp_lm_head else t.tp_size)
        else:
            total += size
    return total


def _holds(expert: int, t: Topology, rank: int) -> bool:
    return expert // (8 // t.ep_size) == t.ep_rank(rank)


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("shards"), 5, tokenizer=False, **FP8)


@pytest.mark.parametrize(
    "topology",
    [
        Topology(4),
        Topology(4, ep_size=4),
        Topology(4, attn_dp_size=2, ep_size=2),
        Topology(4, 4, 4, enable_dp_lm_head=True, moe_a2a_backend="all_to_all"),
        Topology(4, 2, 4, moe_dense_tp_size=1, moe_a2a_backend="deepep"),
    ],
    ids=str,
)
def test_a_rank_reads_its_own_part_only(fp8: Path, topology: Topology) -> None:
    _, whole = load(fp8, SINGLE)
    assert whole.num_bytes_read == sum(file.tensors[name].num_bytes for name, file in read_checkpoint(fp8).items())
    for rank in range(topology.tp_size):
        _, reader = load(fp8, imagine(topology, rank, []))
        assert reader.num_bytes_read == expected_bytes(fp8, topology, rank) < whole.num_bytes_read
    if topology == Topology(4, ep_size=4):
        assert reader.num_bytes_read < 0.4 * whole.num_bytes_read  # experts are most of it


@torch.no_grad()
def calls_of_a_step(path: Path, topology: Topology, tokens: Sequence[int], rank: int = 0) -> Counter[str]:
    """Messages of a rank in one step with `num_tokens` tokens in every attention group."""
    calls: list[str] = []
    parallel = imagine(topology, rank, calls)
    model, _ = load(path, parallel)
    stepper = Stepper(model, local_config(model.config, parallel), model.backends)
    own = tokens[parallel.attn_dp_rank]
    batch = stepper.batch([Chunk(0, list(range(own)), decode=False)] if own else [])
    sizes = StepSizes.known(parallel, tokens, tokens, prefills=True)
    logits = model.logits(model.forward(replace(batch, sizes=sizes)), sizes)
    assert logits.shape == (own, model.config.vocab_size)
    return Counter(calls)


def test_collectives_of_a_step(tmp_path: Path) -> None:
    """Only the necessary messages of each form, for 3 layers, one of them dense."""
    path = make_checkpoint("deepseek_v3", tmp_path, 5, tokenizer=False)
    assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 3
    assert not calls_of_a_step(path, Topology(1), [5])
    # embedding, then attention and feed-forward of each layer; attention's group is the world
    assert calls_of_a_step(path, Topology(2), [5]) == {
        "world all_reduce": 6, "attn_tp all_reduce": 1, "attn_tp all_gather": 1
    }  # fmt: skip
    # attention alone; in and out of each feed-forward part, hidden states in and logits out of the head
    even = calls_of_a_step(path, Topology(2, attn_dp_size=2), [4, 4])
    assert even == {"world all_gather": 3 + 1, "world reduce_scatter": 3, "world all_to_all": 1}
    assert calls_of_a_step(path, Topology(2, attn_dp_size=2), [4, 0]) == {"world all_to_all": 3 + 3 + 2}
    assert calls_of_a_step(path, Topology(2, attn_dp_size=2), [4, 0], rank=1) == {"world all_to_all": 3 + 3 + 2}
    # both: an attention group's sums are scattered, and its shares gathered for the next attention
    both = calls_of_a_step(path, Topology(4, 2, enable_dp_lm_head=True), [4, 4], rank=3)
    assert both == {
        "attn_tp all_reduce": 1, "attn_tp reduce_scatter": 3, "attn_tp all_gather": 3 + 1,
        "world all_gather": 3, "world reduce_scatter": 3,
    }  # fmt: skip


def test_sizes_are_asked_for(tmp_path: Path) -> None:
    path = make_checkpoint("llama", tmp_path, 5, tokenizer=False)
    parallel = imagine(Topology(2, attn_dp_size=2), 0, [])
    model, _ = load(path, parallel)
    stepper = Stepper(model, model.config, model.backends)
    batch = stepper.batch([Chunk(0, [1, 2], decode=False)])
    with pytest.raises(ValueError, match="StepSizes"):
        model.forward(batch)
    with pytest.raises(ValueError, match="2 tokens"):
        model.forward(replace(batch, sizes=StepSizes.known(parallel, [3, 2], [3, 2], prefills=True)))
    with pytest.raises(ValueError, match="enable-dp-lm-head"):
        model.logits(torch.zeros(1, model.config.hidden_size))


def test_shares_of_a_step() -> None:
    """A group's tokens are divided evenly, the first ranks have one more; every token belongs to one rank."""
    topology = Topology(6, attn_dp_size=2)
    owned: list[list[int]] = [[], []]
    for rank in range(6):
        sizes = StepSizes.known(imagine(topology, rank, []), [7, 2], [1, 0], prefills=False)
        assert sizes.shares == [3, 2, 2, 1, 1, 0] and sizes.logit_shares == [1, 0, 0, 0, 0, 0]
        assert sizes.phase == "prefill"  # the only mode without a dispatcher
        assert sizes.group_shares == sizes.shares[rank // 3 * 3 :][:3]
        own = range(7 if rank < 3 else 2)[sizes.own_tokens]
        assert len(own) == sizes.shares[rank]
        owned[rank // 3] += own
    assert owned == [list(range(7)), list(range(2))]


def test_phase_of_a_step() -> None:
    """Decode mode has a max number of tokens per rank; a larger step, or one with any prefill, uses normal mode."""
    parallel = replace(imagine(Topology(4, 2, 4, moe_a2a_backend="deepep"), 0, []), decode_tokens=3)
    for tokens, prefills, phase in (([6, 5], False, "decode"), ([7, 0], False, "prefill"), ([1, 0], True, "prefill")):
        assert StepSizes.known(parallel, tokens, tokens, prefills).phase == phase
