"""Start of DeepEP: environment, adapter, communicator, queue pairs, network and time limit, by the emulator's rules."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_engine.executor.options import RankPlace
from moe_engine.executor.progress import Progress
from moe_engine.executor.sharded_worker import sharded_worker
from moe_engine.parallel.collectives import SingleRank
from moe_engine.parallel.dispatch.build import Groups, _agree_on, _deepep
from moe_engine.parallel.dispatch.deepep import expanded, legacy, startup
from moe_engine.parallel.dispatch.protocol import DispatchShape
from tests.distributed.dispatch import deepep_emulator as emulator
from tests.kernels.vendors.contract import ContractBroken

SHAPE = DispatchShape(256, 16, 8, 7168, 128, torch.bfloat16)


class Gloo:
    """A process group of `ranks`, on the first rank."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def size(self) -> int:
        return self._ranks

    def rank(self) -> int:
        return 0

    def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> Any:
        return self

    def wait(self) -> None:
        return None


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> emulator.Machine:
    """The emulated machine of one test."""
    made = emulator.Machine(seconds=300)
    monkeypatch.setattr(emulator, "MACHINE", made)
    for name in (startup.GIN, startup.NIC, "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    return made


def connected(ranks: int) -> emulator.NcclGroup:
    group = emulator.NcclGroup(Gloo(ranks), 3)
    startup.connect(group, torch.device("cpu"))
    return group


def make_memory(group: Any) -> expanded.SizedBuffer:
    experts = SingleRank()
    experts.timeout_s = 300.0
    return expanded.make_memory(emulator.module(emulator.ElasticBuffer), group, experts, SHAPE)


def test_the_communicator_exists_only_after_a_collective_on_the_current_device(
    machine: emulator.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(startup.GIN, "1")
    group = emulator.NcclGroup(Gloo(8), 3)
    with pytest.raises(ContractBroken, match="null NCCL communicator"):
        make_memory(group)
    startup.connect(group, torch.device("cpu"))
    make_memory(group)
    group.current_device = 0  # a thread without a set device
    with pytest.raises(ContractBroken, match="null NCCL communicator"):
        make_memory(group)


def test_a_communicator_of_another_device_is_refused(machine: emulator.Machine) -> None:
    group = emulator.NcclGroup(Gloo(8), 3)
    group._comm_ptr = lambda: 0  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="communicator of the current device"):
        startup.connect(group, torch.device("cpu"))


def test_one_node_runs_without_gin_and_several_name_what_is_missing(
    machine: emulator.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"GIN.*OFED.*--moe-a2a-backend two_hop"):
        make_memory(connected(16))
    several: dict[str, str] = {}
    startup.set_environment(2, several)
    assert startup.GIN not in several
    one: dict[str, str] = {}
    startup.set_environment(1, one)
    assert one[startup.GIN] == "1"
    monkeypatch.setenv(startup.GIN, one[startup.GIN])
    make_memory(connected(8))
    kept = {startup.GIN: "0"}
    startup.set_environment(1, kept)
    assert kept[startup.GIN] == "0"


@pytest.mark.parametrize(("ibstat", "nvidia_smi"), [(False, True), (True, False), (False, False)])
def test_multiprocessors_are_counted_without_ibstat_and_nvidia_smi(
    machine: emulator.Machine, ibstat: bool, nvidia_smi: bool
) -> None:
    machine.gin, machine.num_nodes, machine.ibstat, machine.nvidia_smi = True, 2, ibstat, nvidia_smi
    memory = make_memory(connected(16))
    assert memory.num_sms >= 4
    if not ibstat:
        with pytest.raises(ZeroDivisionError):
            memory.buffer.get_theoretical_num_sms(256, 8)


def test_the_gpus_time_limit_is_that_of_the_collectives(machine: emulator.Machine) -> None:
    machine.gin, machine.seconds = True, 301
    with pytest.raises(ContractBroken, match="time limit"):
        make_memory(connected(8))


def test_both_modes_share_one_buffer_of_the_second_generation(
    machine: emulator.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would have two windows, two workspaces and twice the exclusive contexts of each peer."""
    monkeypatch.setattr(emulator.ElasticBuffer, "num_made", 0)
    machine.gin, experts = True, SingleRank()
    experts.timeout_s = 300.0
    library = emulator.module(emulator.ElasticBuffer)
    groups = Groups(experts, process_group=emulator.NcclGroup(Gloo(8), 3), deep_ep=library)
    assert len(_deepep(groups, {"normal": replace(SHAPE, max_tokens=4096), "low_latency": SHAPE})) == 2
    assert emulator.ElasticBuffer.num_made == 1


def test_the_library_is_loaded_before_the_first_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's network plugin, mapped with it, is a second libnccl to the library, which refuses to load then."""
    order: list[str] = []

    def join(*args: Any) -> Any:
        order.append("join")
        raise KeyError("joined")

    plan = SimpleNamespace(dispatch=SimpleNamespace(row=SimpleNamespace(name="deepep")), num_nodes=1)
    config: Any = SimpleNamespace(random_seed=0, parallel=plan)
    monkeypatch.setattr(startup, "load", lambda num_nodes: order.append("load"))
    with pytest.raises(KeyError, match="joined"):
        sharded_worker(config, RankPlace(0, 2, "TP", device="cpu"), Progress(lambda: ""), join)
    assert order == ["load", "join"]


def test_ranks_with_different_libraries_are_refused() -> None:
    class Two(SingleRank):
        def all_gather(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x, 1 - x])

    with pytest.raises(ValueError, match=r"rank 0: ElasticBuffer, rank 1: Buffer.*--deepep-version"):
        _agree_on("ElasticBuffer", Two())


@pytest.mark.parametrize("ranks", [16, 32, 64])
def test_queue_pairs_serve_both_modes(machine: emulator.Machine, ranks: int) -> None:
    """256 experts: fewer local experts than multiprocessors of the normal kernels."""
    shape = DispatchShape(256, ranks, 8, 7168, 128, torch.bfloat16)
    with pytest.raises(ContractBroken, match="num_rc_per_pe"):
        emulator.Buffer.check_queues(ranks, shape.num_local)
    buffer = legacy.make_buffer(emulator.module(emulator.Buffer), connected(ranks), shape, low_latency=True)
    assert buffer._num_qps >= max(shape.num_local, emulator.Buffer.num_sms)
    legacy.make_buffer(emulator.module(emulator.Buffer), connected(ranks), shape, low_latency=False)


@pytest.mark.parametrize(("ranks", "cleaned"), [(2, 0), (8, 0), (16, 3)])
def test_normal_mode_cleans_the_buffer_across_nodes_only(ranks: int, cleaned: int) -> None:
    """Barriers of all ranks in a prefill of three layers: one per layer across nodes, none within a node."""
    calls: list[tuple[int, ...]] = []

    class Counted:
        def combine(self, x: torch.Tensor, handle: Any) -> tuple[torch.Tensor, None, None]:
            return x, None, None

        def clean_low_latency_buffer(self, *sizes: int) -> None:
            calls.append(sizes)

    normal = DispatchShape(256, ranks, 8, 7168, 512, torch.bfloat16)
    low_latency = DispatchShape(256, ranks, 8, 7168, 128, torch.bfloat16)
    library: Any = SimpleNamespace(topk_idx_t=torch.int64)
    exchange = legacy.LegacyExchange(library, Counted(), normal, cleans=low_latency)
    for _ in range(3):
        exchange.collect(torch.zeros(4, 8), None)
    assert calls == [(128, 7168, 256)] * cleaned


@pytest.mark.parametrize(("ranks", "tokens", "rounded"), [(2, 3, 4), (3, 3, 4), (8, 3, 3), (6, 5, 6)])
def test_low_latency_tokens_are_rounded_up(ranks: int, tokens: int, rounded: int) -> None:
    shape = DispatchShape(8 * ranks, ranks, 8, 7168, tokens, torch.bfloat16)
    assert legacy.rounded(shape).max_tokens == rounded and ranks * rounded % 4 == 0


@pytest.mark.parametrize(
    ("hca", "adapter"),
    [("", "mlx5_0"), ("mlx5_1", "mlx5_1"), ("mlx5", "mlx5_0"), ("=mlx5_10:1,mlx5_1:1", "mlx5_10"),
     ("^mlx5_0", "mlx5_1"), ("rocep", None)],
)  # fmt: skip
def test_the_adapter_follows_from_the_list_of_nccl(tmp_path: Path, hca: str, adapter: str | None) -> None:
    for name in ("mlx5_0", "mlx5_1", "mlx5_2"):
        (tmp_path / name / "ports" / "1").mkdir(parents=True)
        (tmp_path / name / "ports" / "1" / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "mlx5_10").mkdir()
    environ = {"NCCL_IB_HCA": hca}
    startup.set_environment(2, environ, tmp_path)
    assert environ.get(startup.NIC) == adapter
    assert startup.adapter_gbs({startup.NIC: "mlx5_1"}, tmp_path) == 50.0
    assert startup.adapter_gbs({startup.NIC: "absent"}, tmp_path) is None


def test_a_library_that_does_not_load_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "deep_ep.py").write_text("raise AssertionError('Duplicate NCCL runtime')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    monkeypatch.setenv(startup.GIN, "1")
    with pytest.raises(ValueError, match=r"Duplicate NCCL runtime.*--moe-a2a-backend all_to_all"):
        startup.load(1)
