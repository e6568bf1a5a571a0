"""The methods of a rank that the frontend may call by name (`collective_rpc`), with typed arguments."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_engine.errors import MoeEngineError
from moe_engine.worker.eplb.expert_control import ExpertControl
from moe_engine.worker.kv_cache.storage_io import StorageIO
from moe_engine.worker.lora_adapters import AdapterArgs, AdapterId, LoraAdapters
from moe_engine.worker.memory_release import MemoryRelease, ReleaseArgs
from moe_engine.worker.memory_usage import memory_usage
from moe_engine.worker.model_runner import ModelRunner
from moe_engine.worker.profiler import ProfileArgs, Profiler
from moe_engine.worker.read_ahead import FilesArgs, PageCacheReads
from moe_engine.worker.weight_groups import GroupName, JoinArgs, ReceiveArgs
from moe_engine.worker.weight_read import ReadArgs
from moe_engine.worker.weight_update import CheckpointArgs, TensorArgs, WeightUpdate

NO_ARGS: Mapping[str, Any] = {}


class NoArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Arguments of methods without any."""


class TransferArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Address at which the leader of an attention group commands transfers of KV to other servers."""

    address: str


@dataclass(frozen=True)
class RankMethod:
    """`run` takes an instance of `args`; it returns a plain value for msgpack, and never waits for another rank."""

    run: Callable[[Any], Any]
    args: type[msgspec.Struct] = NoArgs


def rank_methods(runner: ModelRunner, experts: ExpertControl, weights: WeightUpdate | None) -> dict[str, RankMethod]:
    """All methods. They run on the worker's thread, between steps."""
    profiler, files = Profiler(runner, runner.shared.parallel.world_rank), PageCacheReads()
    return {
        "memory_usage": RankMethod(lambda _: memory_usage(runner)),
        "read_ahead": RankMethod(files.is_reading, FilesArgs),
        "start_experts": RankMethod(lambda _: experts.start()),
        "stop_experts": RankMethod(lambda _: experts.stop()),
        "dump_experts": RankMethod(lambda _: experts.dump_part()),
        "view_experts": RankMethod(lambda _: experts.snapshot()),
        "freeze_gc": RankMethod(lambda _: _freeze_gc()),
        "start_profile": RankMethod(profiler.start, ProfileArgs),
        "stop_profile": RankMethod(lambda _: profiler.stop()),
        "clear_storage": RankMethod(lambda _: _storage(runner).clear()),
        "storage_facts": RankMethod(lambda _: _storage(runner).facts()),
        "join_transfers": RankMethod(lambda args: runner.kv_copies.on_join(args.address), TransferArgs),  # type: ignore
        **({} if weights is None else _weight_methods(weights) | _memory_methods(MemoryRelease(runner, weights))),
        **({} if runner.lora is None else _lora_methods(runner.lora)),
    }


def _storage(runner: ModelRunner) -> StorageIO:
    """The storage of this rank. Raises MoeEngineError: there is none."""
    storage = getattr(runner.kv_copies, "storage", None)
    if storage is None:
        raise MoeEngineError("there is no storage below the KV cache (--hicache-storage-backend)")
    return storage  # type: ignore[no-any-return]


def _weight_methods(weights: WeightUpdate) -> dict[str, RankMethod]:
    return {
        "check_weights": RankMethod(weights.check, CheckpointArgs),
        "stage_weights": RankMethod(weights.stage, CheckpointArgs),
        "check_tensors": RankMethod(weights.check_tensors, TensorArgs),
        "stage_tensors": RankMethod(weights.stage_tensors, TensorArgs),
        "check_received": RankMethod(weights.check_received, ReceiveArgs),
        "stage_received": RankMethod(weights.stage_received, GroupName),
        "list_groups": RankMethod(lambda _: weights.groups.facts()),
        "join_group": RankMethod(weights.groups.join, JoinArgs),
        "leave_group": RankMethod(weights.groups.leave, GroupName),
        "receive_tensors": RankMethod(weights.groups.receive, ReceiveArgs),
        "group_state": RankMethod(weights.groups.state, GroupName),
        "read_weight": RankMethod(weights.reading.read, ReadArgs),
        "commit_weights": RankMethod(lambda _: weights.commit()),
        "discard_weights": RankMethod(lambda _: weights.discard()),
    }


def _memory_methods(memory: MemoryRelease) -> dict[str, RankMethod]:
    return {
        "release_memory": RankMethod(memory.release, ReleaseArgs),
        "resume_memory": RankMethod(memory.resume, ReleaseArgs),
    }


def _lora_methods(lora: LoraAdapters) -> dict[str, RankMethod]:
    return {"load_lora": RankMethod(lora.load, AdapterArgs), "unload_lora": RankMethod(lora.unload, AdapterId)}


def run_method(methods: Mapping[str, RankMethod], name: str, args: Mapping[str, Any]) -> Any:
    """
    Raises:
        MoeEngineError: unknown method or wrong arguments.
    """
    method = methods.get(name)
    if method is None:
        raise MoeEngineError(f"unknown method {name!r:.100}")
    try:
        checked = msgspec.convert(args, method.args)
    except msgspec.ValidationError as error:
        raise MoeEngineError(f"{name}: {error}") from None
    return method.run(checked)


def _freeze_gc() -> int:
    """Number of objects that the garbage collector of this process no longer scans."""
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
