"""A trainer in a separate process: rank 0 of a group with an engine, which broadcasts weights."""

from __future__ import annotations

import multiprocessing
import os
import queue
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file

from moe_engine.processes.addresses import free_port

ADDRESS = "127.0.0.1"


def joined(port: int, world_size: int, name: str) -> Any:
    """A group beside the default group, created as SGLang's clients do."""
    from torch.distributed import distributed_c10d as c10d

    limit = timedelta(seconds=300)  # engines on simulated devices start in minutes
    store, _, _ = next(c10d.rendezvous(f"tcp://{ADDRESS}:{port}", 0, world_size, timeout=limit))
    store = c10d.PrefixStore(name, store)
    helper: Any = c10d._new_process_group_helper
    group, _ = helper(world_size, 0, [], "gloo", store, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _serve(commands: Connection, port: int, world_size: int, name: str) -> None:
    group = joined(port, world_size, name)
    commands.send("joined")
    while True:
        path, names = commands.recv()
        tensors = load_file(Path(path) / "model.safetensors")
        try:
            for tensor in names:
                dist.broadcast(tensors[tensor].contiguous(), src=0, group=group)
            commands.send("sent")
        except RuntimeError as error:
            commands.send(str(error))


class TrainerProcess:
    """Joins in the background. `send` begins to broadcast; `answer` waits for the end of the last command."""

    def __init__(self, world_size: int, name: str = "weight_update_group") -> None:
        self.port = free_port()
        self._pipe, theirs = multiprocessing.get_context("fork").Pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(theirs, self.port, world_size, name), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, path: Path, names: list[str]) -> None:
        self._pipe.send((str(path), names))

    def answer(self) -> str:
        if not self._pipe.poll(60):
            raise queue.Empty
        return str(self._pipe.recv())

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, 9)
        self.process.join()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
