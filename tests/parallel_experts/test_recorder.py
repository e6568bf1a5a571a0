"""The recorder against counting by hand, on one rank and on several that sum, in every mode."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

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
from moe_engine.parallel.recording.dump_file import RecordingError
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
    recorder.begin_pass(number, ids, torch.arange(tokens), [tokens], mode)
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


def load(path: Path | None) -> dict[str, Any]:
    assert path is not None
    return torch.load(path, weights_only=True)


def test_stat_keeps_the_last_passes_in_a_ring(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=4))
    recorder.start()
    generator = torch.Generator().manual_seed(1)
    passes = [draw_pass(generator) for _ in range(6)]
    for number, choices in enumerate(passes[:3]):
        run_pass(recorder, number, choices)
    dump = load(recorder.dump())
    assert set(dump) == {"rank", "logical_count", "average_utilization_rate_over_window"}
    assert dump["rank"] == 0 and dump["average_utilization_rate_over_window"] is None
    assert dump["logical_count"].dtype == torch.int32 and dump["logical_count"].shape == (4, LAYERS, EXPERTS)
    expected = [counted(choices) for choices in passes]
    assert dump["logical_count"].tolist() == np.stack([*expected[:3], np.zeros_like(expected[0])]).tolist()
    for number, choices in enumerate(passes):
        run_pass(recorder, number, choices)
    ring = np.stack([expected[4], expected[5], expected[2], expected[3]])
    assert recorder.snapshot()["counts"] == (sum(expected) + sum(expected[:3])).tolist(), "overwritten and dumped count"
    assert load(recorder.dump())["logical_count"].tolist() == ring.tolist()
    assert not load(recorder.dump())["logical_count"].any(), "a dump forgets"
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
    assert recorder.take()["logical_count"].tolist() == np.stack([counted(choices) for choices in passes]).tolist()
    assert recorder.snapshot()["counts"] == sum(counted(choices) for choices in passes).tolist()
    run_pass(recorder, 0, passes[7])
    assert recorder.take()["logical_count"].tolist() == [counted(passes[7]).tolist()]


def test_start_stop_and_passes_that_do_not_count(tmp_path, caplog):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=2))
    choices = {1: torch.tensor([[0, 1]])}
    assert recorder.recording is False
    recorder.on_select(1, choices[1])  # between passes: a warm-up
    recorder.start()
    recorder.end_pass()  # began before the start
    run_pass(recorder, 5, choices)
    recorder.begin_pass(6, torch.zeros(1), torch.zeros(1))
    recorder.on_select(1, choices[1])  # a pass that failed: no end
    run_pass(recorder, 7, choices)
    recorder.stop()
    recorder.stop()
    assert "nothing to stop" in caplog.text
    assert recorder.take()["logical_count"].sum() == 4, "stop keeps what was recorded"
    recorder.start()
    run_pass(recorder, 8, choices)
    recorder.start()
    assert "already" in caplog.text
    assert recorder.take()["logical_count"].sum() == 0, "start forgets"
    assert recorder.snapshot()["pass"] == 8


@pytest.mark.parametrize("mode", ["stat", "per_pass", "per_token"])
def test_passes_in_inference_mode_and_commands_outside(tmp_path, mode):
    """As in the engine: the step thread computes under inference_mode, whose tensors nobody else may change."""
    recorder = ExpertRecorder(config_for(tmp_path, mode, buffer_size=-1, report_balancedness=True))
    choices = draw_pass(torch.Generator().manual_seed(40))
    for _ in range(2):
        recorder.start()
        with torch.inference_mode():
            for number in range(130):
                run_pass(recorder, number, choices)
            recorder.update_layer(1, torch.arange(EXPERTS))
        assert recorder.snapshot()["counts"] == (130 * counted(choices)).tolist()
        assert load(recorder.dump())
        run_pass(recorder, 130, choices)
        assert recorder.snapshot()["counts"] == (131 * counted(choices)).tolist()


def test_per_pass_records(tmp_path):
    layout = ExpertLayout(EXPERTS, 2, 2)
    placement = plan_placement(np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS), layout)
    table = torch.from_numpy(placement.physical_to_logical.copy())
    config = config_for(tmp_path, "per_pass", num_physical=8, ep_size=2, rank=3, world_size=4)
    recorder = ExpertRecorder(config, physical_to_logical=table)
    recorder.start()
    generator = torch.Generator().manual_seed(3)
    passes = [draw_pass(generator, 8) for _ in range(3)]
    for number, choices in enumerate(passes):
        run_pass(recorder, 40 + number, choices)
    path = recorder.dump()
    assert path is not None and path.name.startswith("expert_distribution_recorder_") and path.name.endswith("_3.pt")
    dump = load(path)
    assert set(dump) == {"records", "last_physical_to_logical_map"}
    assert dump["last_physical_to_logical_map"].tolist() == table.tolist()
    for number, (record, choices) in enumerate(zip(dump["records"], passes)):
        assert (record["forward_pass_id"], record["rank"], record["gatherer_key"]) == (40 + number, 3, "primary")
        assert record["global_physical_count"].tolist() == counted(choices, 8).tolist()
    assert len(dump["records"]) == 3
    assert load(recorder.dump())["records"] == []


def test_per_token_records(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, "per_token"))
    recorder.start()
    generator = torch.Generator().manual_seed(4)
    passes = [draw_pass(generator) for _ in range(2)]
    run_pass(recorder, 0, passes[0], mode=1)
    run_pass(recorder, 1, passes[1], mode=2)
    records = load(recorder.dump())["records"]
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
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=1, padded=True))
    recorder.start()
    choices = draw_pass(torch.Generator().manual_seed(5))
    for topk_ids in choices.values():
        topk_ids[-1] = -1
    run_pass(recorder, 0, choices)
    assert recorder.take()["logical_count"][0].tolist() == counted(choices).tolist()


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
    assert recorder.take()["logical_count"].tolist() == np.stack(expected).tolist()
    assert recorder.snapshot()["counts"] == sum(expected).tolist()


def on_ranks(count: int, work: Callable[[int, Callable[[Tensor], Tensor]], Any]) -> list[Any]:
    """Runs `work(rank, all_reduce)` on a thread a rank; all_reduce sums over them."""
    barrier, given, results = Barrier(count, timeout=30), {}, {}

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


def test_ranks_sum_and_rank_0_writes(tmp_path):
    passes = [[draw_pass(torch.Generator().manual_seed(10 * rank + i)) for i in range(3)] for rank in range(2)]

    def work(rank: int, all_reduce: Callable[[Tensor], Tensor]) -> Any:
        config = config_for(
            tmp_path, rank=rank, world_size=2, ep_rank=rank, ep_size=2, buffer_size=3, report_balancedness=True
        )
        recorder = ExpertRecorder(config, all_reduce)
        recorder.start()
        for number, choices in enumerate(passes[rank]):
            run_pass(recorder, number, choices)
        return recorder.balance.values(), recorder.balance.log_line(), recorder.dump()

    (balance, line, path), (other_balance, _, nothing) = on_ranks(2, work)
    assert nothing is None and [file.name for file in tmp_path.iterdir()] == [path.name]
    summed = np.stack([counted(passes[0][i]) + counted(passes[1][i]) for i in range(3)])  # [S, L, E]
    dump = load(path)
    assert dump["logical_count"].tolist() == summed.tolist()
    by_rank = summed.reshape(3, LAYERS, 2, -1).sum(-1)
    ratio = ((by_rank.mean(-1) + 1e-5) / (by_rank.max(-1) + 1e-5)).mean(-1)
    assert balance == other_balance
    assert balance["current"] == pytest.approx(ratio[-1])
    assert balance["10"] == balance["1000"] == pytest.approx(ratio.mean())
    assert dump["average_utilization_rate_over_window"] == pytest.approx(ratio.mean())
    assert line == (
        f"[Expert Balancedness] forward_pass_id=2 current_pass_balancedness={ratio[-1]:.03f} "
        f"last_10_average_balancedness={ratio.mean():.03f} last_100_average_balancedness={ratio.mean():.03f} "
        f"last_1000_average_balancedness={ratio.mean():.03f} gpu_physical_count_sum={summed[-1].sum()}"
    )


def test_a_full_disk_on_one_rank_is_told_to_all_and_loses_nothing(tmp_path):
    blocked = tmp_path / "file-not-folder"
    blocked.write_text("")
    choices = draw_pass(torch.Generator().manual_seed(20))

    def work(rank: int, all_reduce: Callable[[Tensor], Tensor]) -> Any:
        folder = tmp_path / "dumps" if rank else blocked
        recorder = ExpertRecorder(config_for(folder, "per_pass", rank=rank, world_size=2), all_reduce)
        recorder.start()
        run_pass(recorder, 0, choices)
        with pytest.raises(RecordingError) as caught:
            recorder.dump()
        if rank == 0:
            blocked.unlink()
        return str(caught.value), load(recorder.dump())["records"]

    for rank, found in enumerate(on_ranks(2, work)):
        assert not isinstance(found, Exception), found
        message, records = found
        assert records[0]["global_physical_count"].tolist() == counted(choices).tolist()
        if rank == 0:
            assert "file-not-folder/expert_distribution_recorder_" in message
            assert "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR" in message
        else:
            assert "1 other ranks could not write" in message


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
    with pytest.raises(RecordingError, match=r"recorder_.*\.pt: cannot be written"):
        recorder.dump()
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    assert load(recorder.dump())["logical_count"].sum() > 0


def test_what_the_dispatcher_reports(tmp_path):
    """stat_approx: each rank counts what arrived for its slots, and the choices of the router do not count."""

    def work(rank: int, all_reduce: Callable[[Tensor], Tensor]) -> Any:
        config = config_for(
            tmp_path,
            "stat_approx",
            source="dispatcher",
            rank=rank,
            world_size=2,
            ep_rank=rank,
            ep_size=2,
            buffer_size=1,
        )
        recorder = ExpertRecorder(config, all_reduce)
        recorder.start()
        recorder.begin_pass(0, torch.zeros(3), torch.zeros(3))
        recorder.on_select(1, torch.zeros(3, TOP_K, dtype=torch.int32))
        recorder.on_dispatch(1, [rank + 1, 0, 5])
        recorder.end_pass()
        return recorder.take()["logical_count"][0, 1].tolist()

    assert on_ranks(2, work) == [[1, 0, 5, 2, 0, 5]] * 2


def test_a_stat_dump_becomes_a_placement(tmp_path):
    recorder = ExpertRecorder(config_for(tmp_path, buffer_size=8))
    recorder.start()
    generator = torch.Generator().manual_seed(30)
    passes = [draw_pass(generator) for _ in range(5)]
    for number, choices in enumerate(passes):
        run_pass(recorder, number, choices)
    layout = ExpertLayout(EXPERTS, 2, 2)
    found = from_any(str(recorder.dump()), layout, LAYERS)
    expected: ExpertPlacement = plan_placement(sum(counted(choices) for choices in passes), layout)
    assert (found.physical_to_logical == expected.physical_to_logical).all()


def test_the_directory_is_the_operators(tmp_path):
    variable = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"
    assert recorder_directory({variable: str(tmp_path)}) == tmp_path
    assert recorder_directory({}).is_dir() and recorder_directory({variable: ""}) == recorder_directory({})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "all"}, f"recorder-mode all: unknown; there are {', '.join(MODES)}"),
        ({"mode": "per_token", "top_k": 9}, "holds 8 experts a token, this model has 9; use per_pass"),
        ({"mode": "stat_approx"}, "stat_approx cannot count by the router"),
        ({"mode": "per_token", "source": "dispatcher"}, "per_token cannot count by the dispatcher"),
        ({"buffer_size": 0}, "--expert-distribution-recorder-buffer-size 0"),
        ({"ep_size": 4}, "not a multiple of --ep-size 4"),
    ],
)
def test_refusals_name_the_flag(tmp_path, fields, message):
    with pytest.raises(ConfigError, match=message):
        config_for(tmp_path, **fields)


def test_logs_where_it_wrote(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("moe_engine"), "propagate", True)  # a server set up by a test before keeps it
    caplog.set_level(logging.INFO)
    recorder = ExpertRecorder(config_for(tmp_path / "made" / "anew"))
    assert str(recorder.dump()) in caplog.text
