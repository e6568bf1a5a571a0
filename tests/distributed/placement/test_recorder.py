"""The recorder against counts by hand, on one rank and summed over several, in every mode."""

from __future__ import annotations

import ctypes
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import plan_placement
from moe_engine.parallel.placement.sources import from_any
from moe_engine.parallel.recording.config import MODES, RecorderConfig, recorder_directory
from moe_engine.parallel.recording.dump_file import RecordingError, write_dump
from moe_engine.parallel.recording.joined_replies import sum_snapshots
from moe_engine.parallel.recording.merge import sum_parts, write_parts
from moe_engine.parallel.recording.recorder import ExpertRecorder

LAYERS, EXPERTS, TOP_K = 4, 6, 2
MOE_LAYERS = (1, 3)


def config_for(folder: Path, mode: str = "stat", **fields: Any) -> RecorderConfig:
    sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "num_physical": EXPERTS, "top_k": TOP_K}
    return RecorderConfig(mode=mode, directory=folder, **{**sizes, **fields})


def draw_pass(generator: torch.Generator, num_physical: int = EXPERTS) -> dict[int, Tensor]:
    """Choices int32 [T, K] by MoE layer."""
    tokens = int(torch.randint(1, 9, (1,), generator=generator))
    return {
        layer: torch.rand(tokens, num_physical, generator=generator).topk(TOP_K, dim=1).indices.int()
        for layer in MOE_LAYERS
    }


def run_pass(recorder: ExpertRecorder, number: int, choices: dict[int, Tensor], mode: int = 1) -> None:
    tokens = len(next(iter(choices.values())))
    ids = torch.arange(tokens) + 100 * number
    recorder.begin_pass(number)
    if recorder.wants_batches:
        recorder.describe_pass(ids, torch.arange(tokens), [tokens], mode)
    for layer, topk_ids in choices.items():
        recorder.on_select(layer, topk_ids)
    recorder.end_pass()


def counted(
    choices: dict[int, Tensor], num_physical: int = EXPERTS, to_logical: np.ndarray | None = None
) -> np.ndarray:
    """[L, E or P], one by one."""
    counts = np.zeros((LAYERS, num_physical if to_logical is None else EXPERTS), dtype=np.int64)
    for layer, topk_ids in choices.items():
        for slot in topk_ids.flatten().tolist():
            if slot >= 0:
                counts[layer, slot if to_logical is None else to_logical[layer, slot]] += 1
    return counts


def dumped(folder: Path, *recorders: ExpertRecorder) -> dict[str, Any]:
    """The file of these ranks' dump."""
    (path,) = write_parts(folder, [recorder.dump_part() for recorder in recorders])
    return load(path)


def counts_of(recorder: ExpertRecorder) -> Tensor:
    """int32 [S, L, E] of a dump of stat."""
    part = recorder.dump_part()
    assert part is not None
    return sum_parts([part])["logical_count"]


def load(path: Path | str) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def test_stat_keeps_the_last_passes_in_a_ring(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=4))
    recorder.start()
    generator = torch.Generator().manual_seed(1)
    passes = [draw_pass(generator) for _ in range(6)]
    for number, choices in enumerate(passes[:3]):
        run_pass(recorder, number, choices)
    dump = dumped(tmp_path, recorder)
    assert set(dump) == {"rank", "logical_count", "average_utilization_rate_over_window"}
    assert dump["rank"] == 0 and dump["average_utilization_rate_over_window"] is None
    assert dump["logical_count"].dtype == torch.int32 and dump["logical_count"].shape == (4, LAYERS, EXPERTS)
    expected = [counted(choices) for choices in passes]
    assert dump["logical_count"].tolist() == np.stack([*expected[:3], np.zeros_like(expected[0])]).tolist()
    for number, choices in enumerate(passes):
        run_pass(recorder, number, choices)
    ring = np.stack(expected[2:])  # oldest first
    assert recorder.snapshot()["counts"] == (sum(expected) + sum(expected[:3])).tolist(), "overwritten and dumped count"
    assert dumped(tmp_path, recorder)["logical_count"].tolist() == ring.tolist()
    assert not dumped(tmp_path, recorder)["logical_count"].any(), "a dump forgets"
    assert recorder.snapshot()["counts"] == (sum(expected) + sum(expected[:3])).tolist()
    recorder.start()
    assert recorder.snapshot()["counts"] == np.zeros_like(expected[0]).tolist()


def test_an_endless_buffer_doubles_and_dumps_what_is_used(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=-1))
    recorder.start()
    generator = torch.Generator().manual_seed(2)
    passes = [draw_pass(generator) for _ in range(300)]
    for number, choices in enumerate(passes):
        run_pass(recorder, number, choices)
    assert counts_of(recorder).tolist() == np.stack([counted(choices) for choices in passes]).tolist()
    assert recorder.snapshot()["counts"] == sum(counted(choices) for choices in passes).tolist()
    run_pass(recorder, 0, passes[7])
    assert counts_of(recorder).tolist() == [counted(passes[7]).tolist()]


def test_start_stop_and_passes_that_do_not_count(tmp_path, caplog):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=2))
    choices = {1: torch.tensor([[0, 1]])}
    assert recorder.recording is False
    recorder.on_select(1, choices[1])  # between passes: a warm-up
    recorder.start()
    recorder.end_pass()  # began before the start
    run_pass(recorder, 5, choices)
    recorder.begin_pass(6)
    recorder.on_select(1, choices[1])  # a failed pass has no end
    run_pass(recorder, 7, choices)
    recorder.stop()
    recorder.stop()
    assert "nothing to stop" in caplog.text
    assert counts_of(recorder).sum() == 4, "stop keeps the recorded counts"
    recorder.start()
    run_pass(recorder, 8, choices)
    recorder.start()
    assert "already" in caplog.text
    assert counts_of(recorder).sum() == 0, "start forgets"
    assert recorder.snapshot()["pass"] == 8


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_passes_in_inference_mode_and_commands_outside(tmp_path, mode):
    """The engine's step thread computes in inference_mode; other threads may not modify its tensors."""
    recorder = ExpertRecorder(config_for(tmp_path, mode, buffer_size=-1, report_balancedness=True))
    choices = draw_pass(torch.Generator().manual_seed(40))
    for _ in range(2):
        recorder.start()
        with torch.inference_mode():
            for number in range(130):
                run_pass(recorder, number, choices)
            recorder.update_layer(1, torch.arange(EXPERTS))
        assert recorder.snapshot()["counts"] == (130 * counted(choices)).tolist()
        assert dumped(tmp_path, recorder)
        run_pass(recorder, 130, choices)
        assert recorder.snapshot()["counts"] == (131 * counted(choices)).tolist()


def test_per_pass_records(tmp_path):
    layout = ExpertLayout(EXPERTS, 2, 2)
    placement = plan_placement(np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS), layout)
    table = torch.from_numpy(placement.physical_to_logical.copy())
    config = config_for(tmp_path, "per_pass", num_physical=8, ep_size=2, rank=3)
    recorder = ExpertRecorder(config, physical_to_logical=table)
    recorder.start()
    generator = torch.Generator().manual_seed(3)
    passes = [draw_pass(generator, 8) for _ in range(3)]
    for number, choices in enumerate(passes):
        run_pass(recorder, 40 + number, choices)
    part = recorder.dump_part()
    assert part is not None
    path = Path(part["path"])
    assert path.parent == tmp_path
    assert path.name.startswith("expert_distribution_recorder_") and path.name.endswith("_3.pt")
    dump = load(path)
    assert set(dump) == {"records", "last_physical_to_logical_map"}
    assert dump["last_physical_to_logical_map"].tolist() == table.tolist()
    for number, (record, choices) in enumerate(zip(dump["records"], passes)):
        assert (record["forward_pass_id"], record["rank"], record["gatherer_key"]) == (40 + number, 3, "primary")
        assert record["global_physical_count"].tolist() == counted(choices, 8).tolist()
    assert len(dump["records"]) == 3
    assert dumped(tmp_path, recorder)["records"] == []


def test_per_token_records(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, "per_token"))
    recorder.start()
    generator = torch.Generator().manual_seed(4)
    passes = [draw_pass(generator) for _ in range(2)]
    run_pass(recorder, 0, passes[0], mode=1)
    run_pass(recorder, 1, passes[1], mode=2)
    records = dumped(tmp_path, recorder)["records"]
    for number, (record, choices) in enumerate(zip(records, passes)):
        tokens = len(choices[1])
        assert record["input_ids"] == [100 * number + i for i in range(tokens)]
        assert record["positions"] == list(range(tokens)) and record["extend_seq_lens"] == [tokens]
        assert record["forward_mode"] == number + 1 and record["misc_objects"] == []
        topk = record["topk_ids_of_layer"]
        assert topk.dtype == torch.int32 and topk.shape == (LAYERS, tokens, 8)
        for layer in range(LAYERS):
            used = choices[layer] if layer in choices else torch.full((tokens, TOP_K), -1)
            assert torch.equal(topk[layer, :, :TOP_K], used.int()) and bool((topk[layer, :, TOP_K:] == -1).all())
        assert record["global_physical_count"].tolist() == counted(choices).tolist()


def test_padded_rows_are_not_counted(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=1))
    recorder.start()
    choices = draw_pass(torch.Generator().manual_seed(5))
    for topk_ids in choices.values():
        topk_ids[-1] = -1
    run_pass(recorder, 0, choices)
    assert counts_of(recorder)[0].tolist() == counted(choices).tolist()


def test_copies_are_counted_as_their_expert_also_while_they_move(tmp_path):
    generator = np.random.default_rng(6)
    layout = ExpertLayout(EXPERTS, 2, 4)
    tables = [
        plan_placement(generator.lognormal(3, 2, (LAYERS, EXPERTS)), layout).physical_to_logical for _ in range(2)
    ]
    config = config_for(tmp_path, num_physical=10, ep_size=2, buffer_size=2)
    recorder = ExpertRecorder(config, physical_to_logical=torch.from_numpy(tables[0].copy()))
    recorder.start()
    choices = draw_pass(torch.Generator().manual_seed(7), 10)
    run_pass(recorder, 0, choices)
    mixed = tables[0].copy()
    mixed[1] = tables[1][1]
    recorder.update_layer(1, torch.from_numpy(mixed[1]))
    run_pass(recorder, 1, choices)
    expected = [counted(choices, to_logical=tables[0]), counted(choices, to_logical=mixed)]
    assert counts_of(recorder).tolist() == np.stack(expected).tolist()
    assert recorder.snapshot()["counts"] == sum(expected).tolist()


def on_ranks(count: int, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
    """Runs `work(rank, all_reduce)` on one thread per rank; all_reduce sums over the threads."""
    barrier, given, results = Barrier(count, timeout=240), {}, {}

    def reducer(rank: int) -> Callable[[Tensor], Tensor]:
        def all_reduce(tensor: Tensor) -> Tensor:
            given[rank] = tensor.clone()
            barrier.wait()
            total = torch.stack([given[other] for other in range(count)]).sum(0).to(tensor.dtype)
            barrier.wait()
            return tensor.copy_(total)

        return all_reduce

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank, reducer(rank))
        except Exception as error:
            results[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [results[rank] for rank in range(count)]


def test_ranks_sum_pass_by_pass_and_one_file_holds_all(tmp_path):
    """Holds also if one rank starts a pass later and rank 0 has already counted tokens of another rank."""
    passes = [[draw_pass(torch.Generator().manual_seed(10 * rank + i)) for i in range(3)] for rank in range(3)]

    def work(rank: int, all_reduce: Callable[[Tensor], Tensor]) -> Any:
        config = config_for(
            tmp_path, rank=rank, counts_here=rank < 2, ep_rank=rank, ep_size=3, buffer_size=3, report_balancedness=True
        )
        recorder = ExpertRecorder(config, all_reduce)
        for number, choices in enumerate(passes[rank]):
            if number == rank:
                recorder.start()
            if recorder.counting:
                run_pass(recorder, number, choices)
            else:
                recorder.end_pass()
        return recorder

    recorders = on_ranks(3, work)
    first, other, third = recorders
    snapshot = sum_snapshots([recorder.snapshot() for recorder in recorders])
    assert third.dump_part() is None and not third.counting
    parts = [msgspec.msgpack.decode(msgspec.msgpack.encode(recorder.dump_part())) for recorder in recorders]
    (path,) = write_parts(tmp_path, parts)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    seen = np.stack([counted(passes[0][i]) + counted(passes[1][i]) for i in range(3)])  # [S, L, E]
    summed = seen.copy()
    summed[0] -= counted(passes[1][0])
    dump = load(path)
    assert dump["rank"] == 0 and dump["logical_count"].tolist() == summed.tolist()
    by_rank = seen.reshape(3, LAYERS, 3, -1).sum(-1)
    ratio = ((by_rank.mean(-1) + 1e-5) / (by_rank.max(-1) + 1e-5)).mean(-1)
    balance = first.balance.values()
    assert balance == other.balance.values() == third.balance.values()
    assert balance["current"] == pytest.approx(ratio[-1])
    assert balance["10"] == balance["1000"] == pytest.approx(ratio.mean())
    assert dump["average_utilization_rate_over_window"] == pytest.approx(ratio.mean())
    assert first.balance.log_line() == (
        f"[Expert Balancedness] forward_pass_id=2 current_pass_balancedness={ratio[-1]:.03f} "
        f"last_10_average_balancedness={ratio.mean():.03f} last_100_average_balancedness={ratio.mean():.03f} "
        f"last_1000_average_balancedness={ratio.mean():.03f} gpu_physical_count_sum={seen[-1].sum()}"
    )
    assert snapshot is not None and snapshot["counts"] == summed.sum(0).tolist() and snapshot["recording"]
    assert sum_snapshots([None, snapshot, None]) == snapshot and sum_snapshots([None]) is None


def test_counts_beyond_two_bytes_and_a_full_ring_on_one_of_two_ranks(tmp_path):
    recorders = [ExpertRecorder(config_for(tmp_path, rank=rank, buffer_size=2)) for rank in range(2)]
    many = {1: torch.zeros(40_000, 2, dtype=torch.int32)}
    for rank, recorder in enumerate(recorders):
        recorder.start()
        for number in range(3 - rank):
            run_pass(recorder, number, many)
    counts = dumped(tmp_path, *recorders)["logical_count"]
    assert counts[:, 1, 0].tolist() == [160_000, 80_000], "passes 1 and 2, the last one of a single rank"


class Cell(ctypes.Structure):
    _fields_ = [("counts", ctypes.POINTER(ctypes.c_int32)), ("unclear", ctypes.c_int64)]


def count_in_place(recorder: ExpertRecorder, choices: dict[int, Tensor]) -> None:
    """Counts as a kernel does: clears the counts at the pointer, if any, then adds to them."""
    for layer, topk_ids in choices.items():
        place = recorder.count_place(layer)
        assert place is not None
        cell = ctypes.cast(place.cell.address, ctypes.POINTER(Cell)).contents
        if cell.counts:
            ctypes.memset(cell.counts, 0, cell.unclear)
            cell.unclear = 0
            for expert in topk_ids.flatten().tolist():
                cell.counts[place.first + expert] += 1


@pytest.mark.parametrize("buffer_size", [1, 4, -1])
@torch.inference_mode()
def test_passes_counted_where_they_are_kept(tmp_path, buffer_size):
    """All layers count on their own. Failed passes, also incomplete ones, are not counted and do not disturb others."""
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=buffer_size))
    recorder.start()
    recorder.count_in_place(True)
    generator = torch.Generator().manual_seed(71)
    passes = [draw_pass(generator) if number % 5 else {} for number in range(300 if buffer_size < 0 else 11)]
    for number, choices in enumerate(passes):
        recorder.begin_pass(number)
        count_in_place(recorder, choices)
        recorder.end_pass()
        count_in_place(recorder, passes[1])
        recorder.begin_pass(number + 1)
        count_in_place(recorder, passes[2])  # and fails
        if number % 3:
            recorder.drop_pass()
    expected = [counted(choices) for choices in passes]
    assert recorder.snapshot()["counts"] == sum(expected).tolist()
    part = recorder.dump_part()
    assert part is not None
    kept = len(passes) if buffer_size < 0 else buffer_size
    assert part["pass_ids"] == list(range(len(passes)))[-kept:]
    assert sum_parts([part])["logical_count"].tolist() == np.stack(expected[-kept:]).tolist()
    recorder.count_in_place(False)
    run_pass(recorder, 400, passes[1])
    recorder.count_in_place(True)
    recorder.begin_pass(401)
    count_in_place(recorder, passes[2])
    recorder.end_pass()
    recorder.update_layer(1, torch.arange(EXPERTS).flip(0))  # other experts: the counts no longer match the placement
    recorder.begin_pass(402)
    count_in_place(recorder, {1: passes[1][1].new_tensor([[0]])})
    recorder.end_pass()
    assert recorder.snapshot()["counts"][1][EXPERTS - 1] > 0
    found = [counted(passes[1]), counted(passes[2]), counted({1: torch.tensor([[EXPERTS - 1]])})][-kept:]
    assert counts_of(recorder)[: len(found)].tolist() == np.stack(found).tolist()


@pytest.mark.parametrize("mode", ["stat", "per_pass"])
def test_layers_that_count_themselves(tmp_path, mode):
    """Some layers count, others record their choices; choices between passes and in failed passes are not counted."""
    recorder = ExpertRecorder(config_for(tmp_path, mode, buffer_size=3))
    generator = torch.Generator().manual_seed(70)
    passes = [draw_pass(generator) for _ in range(3)]
    count_in_place(recorder, passes[0])
    recorder.start()
    for number, choices in enumerate(passes):
        recorder.begin_pass(9)
        count_in_place(recorder, passes[2])
        recorder.drop_pass()
        count_in_place(recorder, passes[1])
        recorder.begin_pass(number)
        count_in_place(recorder, {1: choices[1]})
        recorder.on_select(3, choices[3])
        recorder.end_pass()
        count_in_place(recorder, passes[0])
    dump = dumped(tmp_path, recorder)
    found = dump["logical_count"] if mode == "stat" else [r["global_physical_count"] for r in dump["records"]]
    assert [counts.tolist() for counts in found] == [counted(choices).tolist() for choices in passes]


def test_who_must_be_told(tmp_path):
    """per_token keeps the ids, stat_approx the arrived tokens."""
    configs = [config_for(tmp_path, "per_token"), config_for(tmp_path, "stat_approx", source="dispatcher")]
    assert [ExpertRecorder(config).count_place(1) for config in configs] == [None, None]


@pytest.mark.parametrize("mode", ["stat", "per_token"])
def test_halves_that_take_turns_are_one_pass(tmp_path, mode):
    """Each layer runs for some of the tokens, then for the smaller rest."""
    recorder = ExpertRecorder(config_for(tmp_path, mode))
    recorder.start()
    first, second = (draw_pass(torch.Generator().manual_seed(60 + half)) for half in range(2))
    both = {layer: torch.cat([first[layer], second[layer]]) for layer in MOE_LAYERS}
    tokens = len(both[1])
    recorder.begin_pass(0)
    if recorder.wants_batches:
        recorder.describe_pass(torch.zeros(tokens), torch.zeros(tokens), [tokens], 1)
    for layer in MOE_LAYERS:
        recorder.on_select(layer, first[layer])
        recorder.on_select(layer, second[layer])
    recorder.end_pass()
    assert recorder.snapshot()["counts"] == counted(both).tolist()
    if mode == "per_token":
        topk = dumped(tmp_path, recorder)["records"][0]["topk_ids_of_layer"]
        assert all(torch.equal(topk[layer, :, :TOP_K], both[layer]) for layer in MOE_LAYERS)


def test_the_rebalancers_window_is_its_own(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=2))
    choices = draw_pass(torch.Generator().manual_seed(50))
    recorder.watch()
    run_pass(recorder, 0, choices)
    recorder.start()
    run_pass(recorder, 1, choices)
    assert counts_of(recorder).sum(0).tolist() == counted(choices).tolist()
    recorder.stop()
    run_pass(recorder, 2, choices)
    assert recorder.take_window().tolist() == (3 * counted(choices)).tolist()
    assert not recorder.take_window().any()


def test_a_rank_that_cannot_write_keeps_its_records(tmp_path):
    blocked = tmp_path / "file-not-folder"
    blocked.write_text("")
    choices = draw_pass(torch.Generator().manual_seed(20))
    recorders = [
        ExpertRecorder(config_for(tmp_path / "dumps" if rank else blocked, "per_pass", rank=rank)) for rank in range(2)
    ]
    for recorder in recorders:
        recorder.start()
        run_pass(recorder, 0, choices)
    with pytest.raises(RecordingError, match=r"^rank 0: .*file-not-folder/.*SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"):
        write_parts(tmp_path, [recorder.dump_part() for recorder in recorders])
    blocked.unlink()
    paths = write_parts(tmp_path, [recorder.dump_part() for recorder in recorders])
    lost, written = (load(path)["records"] for path in paths)
    assert lost[0]["global_physical_count"].tolist() == counted(choices).tolist() and written == []


@pytest.mark.parametrize("room", [0, 700, 100_000, 800_300])
def test_the_reason_of_a_failed_write_is_named(tmp_path, room):
    """torch hides it behind an error of its own if the file ends within a tensor. The limit of file sizes stands for
    the end of the disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(RecordingError, match=r"recorder_.*\.pt: cannot be written \(File too large\); no data"):
            write_dump(tmp_path, {"counts": torch.zeros(200_000, dtype=torch.int32)}, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_dump_is_whole_or_not_there(tmp_path, monkeypatch):
    recorder = ExpertRecorder(config_for(tmp_path))
    recorder.start()
    run_pass(recorder, 0, draw_pass(torch.Generator().manual_seed(21)))
    save = torch.save

    def save_on_a_full_disk(content, file):
        with open("/dev/full", "wb") as full:
            save(content, full)

    monkeypatch.setattr(torch, "save", save_on_a_full_disk)
    part = recorder.dump_part()
    with pytest.raises(RecordingError, match=r"recorder_.*\.pt: cannot be written"):
        write_parts(tmp_path, [part])
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    run_pass(recorder, 1, draw_pass(torch.Generator().manual_seed(22)))
    (path,) = write_parts(tmp_path, [part, recorder.dump_part()])
    assert (load(path)["logical_count"].sum((1, 2)) > 0).tolist()[:3] == [True, True, False], "nothing was lost"


def test_what_the_dispatcher_reports(tmp_path):
    """stat_approx: each rank counts the tokens that arrived for its slots, not the router's choices."""
    recorders = []
    for rank in range(2):
        config = config_for(
            tmp_path, "stat_approx", source="dispatcher", rank=rank, ep_rank=rank, ep_size=2, buffer_size=1
        )
        recorder = ExpertRecorder(config)
        recorder.start()
        recorder.begin_pass(0)
        recorder.on_select(1, torch.zeros(3, TOP_K, dtype=torch.int32))
        recorder.on_dispatch(1, torch.tensor([rank + 1, 0, 5]))
        recorder.end_pass()
        assert recorder.counts_dispatched
        recorders.append(recorder)
    assert dumped(tmp_path, *recorders)["logical_count"][0, 1].tolist() == [1, 0, 5, 2, 0, 5]


def test_a_stat_dump_becomes_a_placement(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=8))
    recorder.start()
    generator = torch.Generator().manual_seed(30)
    passes = [draw_pass(generator) for _ in range(5)]
    for number, choices in enumerate(passes):
        run_pass(recorder, number, choices)
    layout = ExpertLayout(EXPERTS, 2, 2)
    (path,) = write_parts(tmp_path, [recorder.dump_part()])
    found = from_any(str(path), layout, LAYERS)
    expected: ExpertPlacement = plan_placement(sum(counted(choices) for choices in passes), layout)
    assert (found.physical_to_logical == expected.physical_to_logical).all()


def test_the_directory_is_the_operators(tmp_path):
    variable = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
    assert recorder_directory({variable: str(tmp_path)}) == tmp_path
    assert recorder_directory({}).is_dir() and recorder_directory({variable: ""}) == recorder_directory({})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "all"}, f"recorder-mode all: unknown; choose from {', '.join(MODES)}"),
        ({"mode": "per_token", "top_k": 9}, "supports 8 experts per token, this model has 9; use per_pass"),
        ({"mode": "per_token", "source": "dispatcher"}, "per_token does not support the dispatcher"),
        ({"buffer_size": 0}, "--expert-distribution-recorder-buffer-size 0"),
        ({"ep_size": 4}, "not a multiple of --ep-size 4"),
    ],
)
def test_refusals_name_the_flag(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        config_for(tmp_path, **fields)


def test_logs_where_it_wrote(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("moe_engine"), "propagate", True)  # disabled by a server of an earlier test
    caplog.set_level(logging.INFO, "moe_engine")
    recorder = ExpertRecorder(config_for(tmp_path))
    (path,) = write_parts(tmp_path / "made" / "anew", [recorder.dump_part()])
    assert str(path) in caplog.text
