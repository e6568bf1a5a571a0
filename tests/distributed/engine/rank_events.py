"""Events in the middle of the requests of `random_ranks`: pauses, flushes, aborts, new weights, a lost rank."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from safetensors import safe_open

from moe_engine import Engine
from tests.distributed.engine.trainer import ADDRESS, TrainerProcess
from tests.fork_server import children
from tests.waiting import until

REPLACING = ("tensors", "broadcast")
"""Events whose engine starts with the weights of another checkpoint."""
EVENTS = ("in_place", "retract", "update", "abort", "flush", *REPLACING)
VERSION = "new"
"""Name of new weights: engines that have both exchange KV again."""
COPIES = (".embed_tokens.weight", ".shared_head.head.weight")


class Event:
    """What happens to an engine of the checkpoint `path` with some ranks. `name`: one of `EVENTS`, ``kill RANK`` of an
    elastic engine, or empty."""

    def __init__(self, name: str, path: Path, num_ranks: int) -> None:
        self.name, self._path, self._ranks = name, path, num_ranks
        self.first = path.parent / "before" if name in REPLACING else path
        """The checkpoint that the engine loads."""
        self._stack = ExitStack()
        self._trainer: TrainerProcess | None = None
        if name == "broadcast":  # before the engine's threads
            self._trainer = self._stack.enter_context(TrainerProcess(1 + num_ranks))

    def __enter__(self) -> Event:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self, engine: Engine) -> None:
        """Replaces the first weights after some tokens of them."""
        if self.name not in REPLACING:
            return
        sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
        engine.generate(input_ids=[list(range(n, 2 * n)) for n in (5, 20)], sampling_params=sampling)
        if self._trainer is not None:
            size = 1 + self._ranks
            joined = engine.init_weights_update_group(ADDRESS, self._trainer.port, 1, size, backend="gloo")
            assert joined[0] and self._trainer.answer() == "joined", joined
        self._replace(engine)

    def _replace(self, engine: Engine) -> None:
        tensors = tensors_of(self._path)
        if self._trainer is None:
            done = engine.update_weights_from_tensor(tensors.items(), weight_version=VERSION)
        else:
            self._trainer.send(self._path, list(tensors))
            dtypes = [str(tensor.dtype) for tensor in tensors.values()]
            done = engine.update_weights_from_distributed(
                list(tensors), dtypes, [list(x.shape) for x in tensors.values()], weight_version=VERSION
            )
        assert done[0], done
        assert self._trainer is None or self._trainer.answer() == "sent"

    async def strike(self, engine: Engine, work: asyncio.Future[Any]) -> None:
        """In the middle of `work`."""
        if not self.name:
            return
        for _ in range(400):  # until something runs
            states = (await asyncio.to_thread(engine.get_server_info))["internal_states"]
            if work.done() or sum(state["generation_tokens_total"] for state in states) > 4:
                break
            await asyncio.sleep(0.01)
        if self.name in ("in_place", "retract"):
            await asyncio.to_thread(engine.pause_generation, self.name)
            await asyncio.sleep(0.2)
            await asyncio.to_thread(engine.continue_generation)
        elif self.name == "update":
            update = partial(engine.update_weights_from_disk, str(self._path), weight_version=VERSION)
            done, message = await asyncio.to_thread(update)
            assert done, message
        elif self.name in REPLACING:
            await asyncio.to_thread(self._replace, engine)
        elif self.name == "abort":
            engine.abort_request(abort_all=True)
        elif self.name == "flush":
            await asyncio.to_thread(engine.flush_cache)
        else:
            parent = psutil.Process(engine._cores[0].pid)
            ranks = sorted(children(parent), key=lambda process: (process.create_time(), process.pid))
            ranks[int(self.name.removeprefix("kill "))].kill()

    def end(self, engine: Engine) -> None:
        """Waits until a loss is noticed: answers may end earlier."""
        if not self.name.startswith("kill"):
            return
        left, found = self._ranks - 1, list[int]()

        def alive() -> bool:
            states = engine.get_server_info()["internal_states"]
            found[:] = [state["alive_groups"] for state in states]
            return found == [left] * left

        until(alive, f"{left} groups are not alive: {found}")


def tensors_of(path: Path) -> dict[str, Any]:
    """Without the copies that MTP layers have of embedding and head."""
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return {name: tensor for name, tensor in tensors.items() if "layers" not in name or not name.endswith(COPIES)}
