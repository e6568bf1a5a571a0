"""``moe-engine experts``: reading of dumps, numbers, pictures, and error messages."""

from __future__ import annotations

import builtins
import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_engine.cli.experts_report import terminal
from moe_engine.cli.experts_report.dumps import read_dumps
from moe_engine.cli.experts_report.statistics import layer_statistics
from moe_engine.cli.main import main
from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.balance import balancedness
from moe_engine.parallel.placement.gain import eplb_gain, usual_layouts
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement
from moe_engine.parallel.placement.sources import from_any
from moe_engine.parallel.recording.config import RecorderConfig
from moe_engine.parallel.recording.merge import write_parts
from moe_engine.parallel.recording.recorder import ExpertRecorder

LAYERS, EXPERTS, TOP_K = 3, 8, 2
PLACEMENT = plan_placement(np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS), ExpertLayout(EXPERTS, 2, 2))


def record(folder: Path, mode: str, passes: list[torch.Tensor], rank: int = 0, first: int = 0) -> str:
    """A dump of recorded choices [T, K] (physical) in layers 1 and 2."""
    config = RecorderConfig(
        mode, LAYERS, EXPERTS, PLACEMENT.num_physical, folder, buffer_size=16, rank=rank, ep_size=2, top_k=TOP_K
    )
    recorder = ExpertRecorder(config, physical_to_logical=torch.from_numpy(PLACEMENT.physical_to_logical.copy()))
    recorder.start()
    for number, ids in enumerate(passes, first):
        recorder.begin_pass(number)
        if recorder.wants_batches:
            recorder.describe_pass(torch.zeros(len(ids)), torch.zeros(len(ids)), None, 2)
        for layer in (1, 2):
            recorder.on_select(layer, ids)
        recorder.end_pass()
    (path,) = write_parts(folder, [recorder.dump_part()])
    return str(path)


def draw(seed: int, count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(6, PLACEMENT.num_physical, generator=generator).topk(TOP_K).indices for _ in range(count)]


def logical(passes: list[torch.Tensor]) -> np.ndarray:
    """[S, L, E] by hand."""
    counts = np.zeros((len(passes), LAYERS, EXPERTS), dtype=np.int64)
    for number, ids in enumerate(passes):
        for layer in (1, 2):
            for slot in ids.flatten().tolist():
                counts[number, layer, PLACEMENT.physical_to_logical[layer, slot]] += 1
    return counts


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_every_mode_is_read(tmp_path, mode):
    passes = draw(1)
    found = read_dumps([record(tmp_path, mode, passes)])
    assert found.mode == mode and found.passes.tolist() == logical(passes).tolist()
    assert found.num_ranks == (None if mode == "stat" else 1)


def test_ranks_of_a_dump_are_summed_and_dumps_in_a_row_joined(tmp_path):
    ranks = [draw(seed, 3) for seed in (2, 3)]
    files = [record(tmp_path, "per_pass", passes, rank) for rank, passes in enumerate(ranks)]
    later = draw(4, 2)
    found = read_dumps([*files, record(tmp_path, "per_pass", later, 1, first=3)])
    assert found.num_ranks == 2
    assert found.passes.tolist() == [*(logical(ranks[0]) + logical(ranks[1])).tolist(), *logical(later).tolist()]
    stat = [record(tmp_path, "stat", passes) for passes in ranks]
    assert read_dumps(stat).passes.tolist() == [*logical(ranks[0]).tolist(), *logical(ranks[1]).tolist()]


def test_layer_statistics_by_hand():
    total = np.zeros((3, 20), dtype=np.int64)
    total[1] = 1
    total[2, :6] = 50, 20, 10, 10, 5, 5
    even, skewed = layer_statistics(total, num_hottest=2)
    assert (even.layer, even.choices, even.imbalance, even.num_idle) == (1, 20, 1.0, 0)
    assert (even.top10, even.top25) == pytest.approx((0.1, 0.25))
    assert (skewed.layer, skewed.imbalance, skewed.num_idle) == (2, 10.0, 14)
    assert (skewed.top10, skewed.top25) == pytest.approx((0.7, 0.95))
    assert skewed.hottest == ((0, 0.5), (1, 0.2))


def test_gain_by_hand():
    """Layer 0 is dense. Two ranks of two experts: the trivial placement puts the hot experts on one rank, the plan on
    two."""
    passes = np.array([[[0, 0, 0, 0], [6, 4, 1, 1]]] * 4)
    gain = eplb_gain(passes, ExpertLayout(4, 2))
    assert gain.trivial == pytest.approx(6 / 10, abs=1e-4)
    assert gain.planned == gain.unseen == pytest.approx(6 / 7, abs=1e-4)
    assert gain.slowest == pytest.approx(7 / 10)
    hot = [rank for rank in gain.placement.by_rank[1].tolist() if {0, 1} & set(rank)]
    assert len(hot) == 2
    assert eplb_gain(passes[:1], ExpertLayout(4, 2)).unseen is None


def test_unseen_traffic_is_judged_by_a_plan_that_has_not_seen_it():
    """The hot experts change after half of the passes: a plan from the first half gains little in the second."""
    layout, generator = ExpertLayout(32, 8, 8), np.random.default_rng(9)
    halves = generator.lognormal(4, 1, (2, 1, 4, 32)).astype(int).repeat(6, axis=1)
    later = eplb_gain(halves[1], layout)
    assert later.unseen == pytest.approx(later.planned)
    drifted = eplb_gain(halves.reshape(12, 4, 32), layout)
    assert drifted.unseen == pytest.approx(balancedness(plan_placement(halves[0], layout), halves[1]))
    assert drifted.unseen < later.planned - 0.1


def test_layouts_to_try():
    assert [(each.num_ranks, each.num_redundant) for each in usual_layouts(6)] == [(2, 0), (2, 2), (4, 2), (4, 6)]
    assert [each.num_ranks for each in usual_layouts(64, num_nodes=4)] == [4, 4, 8, 8, 16, 16, 32, 32, 64, 64]


def test_a_plan_that_is_worse_than_trivial_is_explained():
    """Different passes: the plan for their sum is evaluated pass by pass."""
    even = ExpertLayout(4, 2)
    gain = eplb_gain(np.array([[[9, 0, 9, 0]], [[0, 9, 0, 9]], [[3, 3, 3, 3]]]), even)
    worse, better = replace(gain, trivial=0.9, planned=0.8, slowest=1.065), replace(gain, trivial=0.5, planned=0.9)
    captions = [terminal.gain_table(gains).caption for gains in ([replace(better, slowest=0.7)], [better, worse])]
    assert "evaluated pass by pass" not in captions[0] and "evaluated pass by pass" in captions[1]


def test_the_report_in_the_terminal(tmp_path, capsys):
    file = record(tmp_path, "stat", draw(5, 12))
    assert main(["experts", file]) == 0
    out = capsys.readouterr().out
    assert "12 passes (mode stat); 2 MoE layers of 3, 8 experts; 288 expert choices" in out
    for part in ("max/mean", "top 10 %", "hottest experts", "EP size", "unseen", "multiples of the layer's mean"):
        assert part in out
    counts = read_dumps([file]).total
    hottest = int(counts[1].argmax())
    row = next(line for line in out.splitlines() if line.startswith("│     1 │"))
    assert f" {hottest}: {counts[1, hottest] / counts[1].sum():.1%}" in row


def test_heat_map_marks_the_hot_experts():
    total = np.ones((2, 30), dtype=np.int64)
    total[0] = 0
    total[1, 12] = 1000
    lines = terminal.heat_map(total, width=18).plain.splitlines()
    assert lines[0] == "    1  " + " " * 4 + "█" + " " * 5  # ten characters of three experts
    assert lines[1].startswith("layer  3 experts per character")


def test_pictures_and_plans_are_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, out = record(tmp_path, "per_token", draw(6)), tmp_path / "new" / "report"
    assert main(["experts", file, "--ep-size", "4", "--redundant", "4", "--out", str(out)]) == 0
    for name in ("heat_map.png", "imbalance.png"):
        data = (out / name).read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and min(struct.unpack(">II", data[16:24])) > 300
    plan = out / "placement_ep4_redundant4.json"
    layout = ExpertLayout(EXPERTS, 4, 4)
    expected: ExpertPlacement = plan_placement(logical(draw(6)), layout)
    assert (from_any(str(plan), layout, LAYERS).physical_to_logical == expected.physical_to_logical).all()
    printed = capsys.readouterr().out
    assert str(plan) in printed and "multiples of the layer's mean" not in printed


def test_without_matplotlib_there_is_a_word_and_text(tmp_path, capsys, monkeypatch):
    found = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["experts", record(tmp_path, "stat", draw(7)), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "pip install matplotlib" in out and "multiples of the layer's mean" in out


def save(folder: Path, name: str, content: object) -> str:
    torch.save(content, folder / name)
    return str(folder / name)


def test_mistakes_name_the_file_and_the_fix(tmp_path, capsys):
    stat, per_pass = record(tmp_path, "stat", draw(8)), record(tmp_path, "per_pass", draw(8))
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "short.pt").write_bytes(Path(stat).read_bytes()[:-200])
    empty = record(tmp_path / "empty", "stat", [])
    other = save(tmp_path, "other.pt", {"logical_count": torch.ones(1, 2, 4, dtype=torch.int32)})
    for files, message in (
        ([str(tmp_path / "none.pt")], "none.pt: No such file"),
        ([str(tmp_path)], "is a folder; name one of its dumps: expert_distribution_recorder_"),
        ([str(tmp_path / "text.pt")], "text.pt: not a torch.save file of tensors"),
        ([str(tmp_path / "short.pt")], "short.pt: not a torch.save file of tensors, or truncated"),
        ([empty], "nothing was recorded; record with /start_expert_distribution_record"),
        ([save(tmp_path, "list.pt", [1])], "list.pt: holds neither logical_count nor records"),
        ([save(tmp_path, "flat.pt", {"logical_count": torch.ones(4)})], "flat.pt: logical_count: must be a table"),
        ([stat, other], "other.pt has 2 layers x 4 experts"),
        ([stat, per_pass], "cannot be joined"),
        ([per_pass, per_pass], "pass 0 of rank 0 is in"),
        (
            [save(tmp_path, "r.pt", {"records": [{}], "last_physical_to_logical_map": torch.ones(2, 2)})],
            "'forward_pass_id'",
        ),
        ([stat, "--ep-size", "3", "--redundant", "2"], "--redundant 2: 8 experts plus these are 10 slots"),
        ([stat, "--ep-size", "0"], "--ep-size 0: at least 1"),
        ([stat, "--ep-size", "2", "--nodes", "4"], "--ep-size 2: not a multiple of --nodes 4"),
        ([stat, "--groups", "0"], "--groups 0: "),
        ([stat, "--ep-size", "2", "--groups", "7"], "--groups 7: 8 experts do not form as many equal groups"),
        ([stat, "--ep-size", "two"], "--ep-size"),
        ([stat, "--out", stat], f"--out {stat}: File exists"),
    ):
        assert main(["experts", *files]) == 2, files
        assert message in capsys.readouterr().err, message
    with pytest.raises(ConfigError):
        read_dumps([empty])


def test_sglang_files_are_read(tmp_path):
    """Files as written by SGLang's recorder, from the format's description: a whole ring, with zeros in unused rows;
    2-D counts too."""
    ring = torch.zeros(10, 2, 4, dtype=torch.int32)
    ring[:3] = torch.arange(8).view(2, 4)
    file = save(tmp_path, "a.pt", {"rank": 0, "logical_count": ring, "average_utilization_rate_over_window": 0.7})
    assert read_dumps([file]).passes.tolist() == ring[:3].tolist()
    assert read_dumps([save(tmp_path, "b.pt", {"logical_count": ring[0]})]).passes.tolist() == [ring[0].tolist()]
    plans = json.dumps({"logical_count": ring.tolist()})
    assert from_any(plans, ExpertLayout(4, 2), 2).num_layers == 2
