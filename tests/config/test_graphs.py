"""CUDA graph sizes: SGLang's list, the flags that change it, the ledger's row, and launches without graphs."""

from __future__ import annotations

import pytest

from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.errors import ConfigError
from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need
from moe_engine.models.config_file import load_model_config
from moe_engine.planning.memory.graphs import GRAPH_BYTES, SMALL_GRAPH_BYTES, graph_row, recorded
from moe_engine.planning.resolve import resolve
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.planning.steps.resolve_graphs import graph_sizes
from moe_engine.types.step_settings import GraphSettings
from tests.config.conftest import SMALL, machine
from tests.models.v4_checkpoints import FIELDS


@pytest.fixture
def on_gpu(tmp_path):
    def make(gb: float = 141, config=SMALL, **flags) -> ResolvedConfig:
        import json

        (tmp_path / "config.json").write_text(json.dumps(config))
        args = EngineArgs.from_kwargs(model_path=str(tmp_path), **flags)
        return resolve(args, load_model_config(tmp_path), machine(gb, gb, "cuda"), model_path=str(tmp_path))

    return make


def test_sglangs_list() -> None:
    assert sorted(graph_sizes(24, False)) == [1, 2, 4, 8, 12, 16, 24]
    assert sorted(graph_sizes(30, False))[-2:] == [24, 30]
    assert sorted(graph_sizes(600, False))[-5:] == [496, 512, 544, 576, 600]
    assert sorted(graph_sizes(12, True)) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]
    assert sorted(graph_sizes(300, True))[-4:] == [256, 272, 288, 300]


@pytest.mark.parametrize(("gb", "largest"), [(16, 8), (24, 48), (40, 32), (80, 256), (141, 256), (180, 512)])
def test_largest_by_memory(on_gpu, gb: float, largest: int) -> None:
    config = on_gpu(gb)
    assert config.graphs.sizes[-1] == largest and config.graphs.sizes[0] == 1
    assert config.flat()["cuda_graph_max_bs_decode"] == largest
    assert on_gpu(gb, max_running_requests=6).graphs.sizes == (1, 2, 4, 6)


def test_the_ledger_counts_them(on_gpu) -> None:
    with_graphs, without = on_gpu(), on_gpu(disable_cuda_graph=True)
    (row,) = (row for row in with_graphs.ledger.rows if row.name == "CUDA graphs")
    least = 256 * with_graphs.model.vocab_size * 4 + with_graphs.graphs.num_graphs * (1 << 20)
    assert row.num_bytes > least and f"{with_graphs.graphs.num_graphs} captured steps" in row.detail
    assert without.graphs == GraphSettings() and all(row.name != "CUDA graphs" for row in without.ledger.rows)
    assert without.max_total_num_tokens > with_graphs.max_total_num_tokens


@pytest.mark.parametrize("mtp_layers", [1, 2])
def test_the_ledger_counts_the_graphs_of_drafts(on_gpu, mtp_layers: int) -> None:
    """A step with drafts is three graphs. Several MTP layers also run over earlier tokens of each request."""
    flags = {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2, "speculative_eagle_topk": 1,
             "speculative_num_draft_tokens": 3, "max_running_requests": 3}  # fmt: skip
    config = on_gpu(config=SMALL | {"num_nextn_predict_layers": mtp_layers}, **flags)
    assert config.graphs.counts == (1, 3) and config.graphs.sizes == (1, 2, 3)
    (row,) = (row for row in config.ledger.rows if row.name == "CUDA graphs")
    assert recorded(config.graphs, chains=True) == (9, 12) and recorded(config.graphs, chains=False) == (6, 0)
    assert "9 graphs of the model, 12 of drafts" in row.detail
    (plain,) = graph_row(config.graphs, config.model, 2, 1, 3, 9)
    driver = 9 * GRAPH_BYTES + 12 * SMALL_GRAPH_BYTES
    assert plain.num_bytes > driver and (row.num_bytes > plain.num_bytes) == (mtp_layers > 1)


def test_adapters_are_captured_where_ranks_compute_whole_groups(on_gpu) -> None:
    lora = {"enable_lora": True, "lora_target_modules": "o_proj", "max_lora_rank": 4, "max_running_requests": 4}
    ranks = {"tp_size": 2, "moe_a2a_backend": "symm_mem"}
    assert on_gpu(**lora).graphs.sizes == on_gpu(**lora, tp_size=2).graphs.sizes == (1, 2, 4)
    assert on_gpu(**lora, **ranks, attn_dp_size=2).graphs.sizes
    for flags in (ranks, {"lora_backend": "torch_native"}):
        assert not on_gpu(**lora, **flags).graphs.sizes


def test_large_graphs_have_no_logits(on_gpu) -> None:
    """The LM head of large graphs runs outside the graph, with the rows that the ledger counts."""
    model, graphs = on_gpu().model, GraphSettings((512,), (1, 4))
    all_rows, some = (graph_row(graphs, model, 2, 1, 512, rows)[0].num_bytes for rows in (2048, 512))
    assert all_rows - some == 1536 * model.vocab_size * 2 * (4 + 2)


def test_the_ledger_counts_rows_of_windows_and_entries(on_gpu) -> None:
    """Lists of captured steps are as wide as those of the longest request."""
    config = {key: value for key, value in FIELDS.items() if value is not None}
    config |= {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16"}
    found = {}
    for length in (4096, 65536):
        resolved = on_gpu(config=config | {"max_position_embeddings": length}, cuda_graph_max_bs=16)
        (row,) = (row for row in resolved.ledger.rows if row.name == "CUDA graphs")
        assert resolved.graphs.sizes[-1] == 16
        found[length] = row.num_bytes
    rows, scores = (1 / 8 + 1 / 4) * 4, 4 / 4  # of all entries in HCA, of index entries in CSA; scores
    assert found[65536] - found[4096] >= 16 * (65536 - 4096) * (rows + scores)


def test_flags(on_gpu) -> None:
    parser = build_parser()
    args = EngineArgs.from_cli(["--cuda-graph-bs", "8", "1", "3", "--disable-cuda-graph-padding"], parser)
    assert args.graphs.cuda_graph_bs_decode == "1 3 8" and args.graphs.disable_cuda_graph_padding
    assert args == EngineArgs.from_kwargs(cuda_graph_bs_decode=[8, 1, 3], disable_cuda_graph_padding=True)
    assert on_gpu(cuda_graph_bs=[4, 64, 2], max_running_requests=10).graphs.sizes == (2, 4)
    exact = on_gpu(cuda_graph_max_bs=40, disable_cuda_graph_padding=True).graphs
    assert exact.sizes == (*range(1, 33), 40) and not exact.pad
    for flags in ({"disable_cuda_graph": True}, {"cuda_graph_backend_decode": "disabled"}):
        assert not on_gpu(**flags).graphs.sizes
    with pytest.raises(ConfigError, match=r"--cuda-graph-bs-decode 0 4.*at least 1"):
        EngineArgs.from_kwargs(cuda_graph_bs_decode="0 4")
    with pytest.raises(ConfigError, match=r"--cuda-graph-max-bs-decode 16.*drop one"):
        on_gpu(cuda_graph_bs_decode="1 8", cuda_graph_max_bs_decode=16)


def test_steps_that_verify_drafts(on_gpu) -> None:
    ngram = {"speculative_algorithm": "NGRAM", "max_running_requests": 8}
    assert on_gpu(speculative_num_steps=3, **ngram).graphs == GraphSettings(tuple(range(1, 9)), (1, 4))
    auto = on_gpu(speculative_num_steps="auto", **ngram)
    assert auto.speculation is not None and auto.graphs.counts == tuple(range(1, auto.speculation.num_steps + 2))


def test_a_cpu_captures_nothing_and_remarks_only_on_given_flags(resolved) -> None:
    assert not resolved().graphs.sizes and not resolved().notes
    assert resolved(disable_cuda_graph=True).notes == (
        "--disable-cuda-graph: no effect (a CPU has no kernel launches to save)",
    )
    assert any("--cuda-graph-max-bs-decode" in note for note in resolved(cuda_graph_max_bs=8).notes)


def test_experts_that_are_recorded_or_moved(on_gpu) -> None:
    alone = on_gpu(expert_distribution_recorder_mode="stat")
    assert alone.graphs.sizes  # only steps with expert recording run without graphs
    many = on_gpu(expert_distribution_recorder_mode="stat", tp_size=2)
    assert not many.graphs.sizes and any("no CUDA graphs: recorded experts" in note for note in many.notes)


def test_dispatchers_whose_host_waits(on_gpu) -> None:
    ranks = {"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "all_to_all"}
    assert on_gpu(**ranks).graphs.sizes
    few = on_gpu(**ranks, max_dispatch_tokens_per_rank=20)
    assert few.graphs.sizes[-1] == 40  # each rank has half of a step's tokens
    config = on_gpu(**ranks, deepep_mode="normal")
    assert not config.graphs.sizes and any("the host waits for the sizes" in note for note in config.notes)


def test_attention_that_cannot_be_replayed(on_gpu) -> None:
    """A note has the reason, and no memory is reserved."""
    config = on_gpu(enable_deterministic_inference=True)
    assert any("no CUDA graphs: --enable-deterministic-inference cuts contexts" in note for note in config.notes)
    assert config.flat()["cuda_graph_backend_decode"] == "disabled"
    assert not config.graphs.sizes and all(row.name != "CUDA graphs" for row in config.ledger.rows)
    rows = {row.name: row.why_not_captured for row in tables.MLA}
    hopper, blackwell = (Device("cuda", "a GPU", (major, 0)) for major in (9, 10))
    fp8, plain = Need("bfloat16", kv_dtype="fp8_e4m3"), Need("bfloat16")
    flashmla = rows["flashmla"]
    assert flashmla is not None and "no list lengths on Hopper" in (flashmla(hopper, fp8) or "")
    assert flashmla(blackwell, fp8) is None and flashmla(hopper, plain) is None


@pytest.mark.parametrize("family", ["attention_backend", "moe_runner_backend"])
def test_rows_that_read_on_the_host_are_not_captured(on_gpu, family: str) -> None:
    config = on_gpu(**{family: "torch"})
    assert not config.graphs.sizes and any("no CUDA graphs: the torch row reads" in note for note in config.notes)
    assert all(row.name != "CUDA graphs" for row in config.ledger.rows) and on_gpu().graphs.sizes


def test_size_for() -> None:
    padded, exact = GraphSettings((1, 4, 6)), GraphSettings((1, 4, 6), pad=False)
    assert [padded.size_for(n) for n in (1, 2, 4, 5, 7)] == [1, 4, 4, 6, None]
    assert [exact.size_for(n) for n in (1, 2, 4, 5, 7)] == [1, None, 4, None, None]
    assert GraphSettings().size_for(1) is None and padded.up_to(5).sizes == (1, 4)
