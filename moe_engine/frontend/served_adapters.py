"""The LoRA adapters that requests may name: loading and unloading on all ranks, and the requests that hold each.

An adapter has a number that is never reused: a later adapter of the same name shares nothing with it, neither weights
nor cached prefixes. Requests hold their adapters while they run. Unloading refuses new requests immediately, waits for
the running ones, and then frees the adapter's slots and memory.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from moe_engine.errors import EngineDeadError, InputError, MoeEngineError
from moe_engine.frontend.client_api import EngineClient
from moe_engine.frontend.read_ahead import known_fingerprint, read_ahead, read_fingerprint
from moe_engine.types.step_settings import LoraSettings

logger = logging.getLogger("moe_engine")

LOAD_SECONDS = 600.0


@dataclass(eq=False)
class ServedAdapter:
    """`key`: fingerprint of its files, for KV that outlives the engine; empty: not known. `idle` is set while no
    request holds the adapter."""

    id: int
    name: str
    path: str
    key: str
    pinned: bool = False
    num_users: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class AdapterChange:
    """Result of loading or unloading. `adapters`: path by name, of those loaded afterwards."""

    success: bool
    message: str
    adapters: dict[str, str]


class ServedAdapters:
    """Bound to one event loop.

    Args:
        settings: None without --enable-lora: every request for an adapter is refused.
    """

    def __init__(self, client: EngineClient, settings: LoraSettings | None) -> None:
        self._client, self._settings = client, settings
        self._by_name: dict[str, ServedAdapter] = {}
        self._in_transit: set[str] = set()
        """Names that are loading."""
        self._num_draining = 0
        started = settings.adapters if settings is not None else ()
        for adapter in started:  # read now: a mount that hangs later does not stop the event loop
            key = known_fingerprint(adapter.path)
            self._by_name[adapter.name] = ServedAdapter(adapter.id, adapter.name, adapter.path, key, adapter.pinned)
        self._ids = itertools.count(len(started) + 1)

    @property
    def paths(self) -> dict[str, str]:
        """Path by name."""
        return {adapter.name: adapter.path for adapter in self._by_name.values()}

    # -- requests

    def choose(self, model: str | None, lora_path: str | None) -> str | None:
        """The adapter of a request; None: the base model.

        Args:
            model: OpenAI's `model`: an adapter's name, ``base:adapter``, or any other name for the base model.
            lora_path: the adapter's name.

        Raises:
            InputError: no such adapter is loaded, or the two differ.
        """
        named = None if model is None else self._named_by(model)
        if lora_path is None:
            return named
        if named is not None and named != lora_path:
            raise InputError.at(
                "lora_path", f"{lora_path!r:.80}, but model {model!r:.80} selects {named!r:.80}; give one of them"
            )
        if lora_path not in self._by_name:
            raise self._unknown("lora_path", f"lora_path: {lora_path!r:.80}")
        return lora_path

    def _named_by(self, model: str) -> str | None:
        info = self._client.info
        if model in ("default", info.served_model_name, info.model_path):
            return None
        if model in self._by_name:
            return model
        _, colon, adapter = model.partition(":")
        if not colon:
            return None
        if adapter not in self._by_name:
            raise self._unknown("model", f"model: {adapter!r:.80} in {model!r:.80}")
        return adapter

    def _unknown(self, field: str, beginning: str) -> InputError:
        if self._settings is None:
            words = "names a LoRA adapter, and this server runs without --enable-lora; leave the adapter out"
        else:
            loaded = ", ".join(list(self._by_name)[:20]) or "none"
            words = f"no LoRA adapter of this name is loaded (loaded: {loaded})"
        return InputError(f"{beginning}: {words}", field=field)

    @contextmanager
    def hold(self, names: Iterable[str | None]) -> Iterator[dict[str | None, ServedAdapter]]:
        """The adapters, which cannot be unloaded inside. Raises InputError if one was unloaded before."""
        wanted = {name for name in names if name is not None}
        held: dict[str | None, ServedAdapter] = {}
        for name in wanted:
            if (adapter := self._by_name.get(name)) is None:
                raise self._unknown("lora_path", f"lora_path: {name!r:.80}")
            held[name] = adapter
        for adapter in held.values():
            adapter.num_users += 1
            adapter.idle.clear()
        try:
            yield held
        finally:
            for adapter in held.values():
                adapter.num_users -= 1
                if not adapter.num_users:
                    adapter.idle.set()

    # -- changes

    async def load(self, name: str, path: str, pinned: bool = False) -> AdapterChange:
        """Loads an adapter on all ranks, or on none. Raises EngineDeadError: no scheduler is alive."""
        problem = self._why_not_load(name, pinned)
        if problem is not None:
            return self._failed(problem)
        self._in_transit.add(name)
        number, folder = next(self._ids), os.path.abspath(os.path.expanduser(path))
        try:
            await read_ahead(self._client, folder, LOAD_SECONDS)
            key = await read_fingerprint(folder, LOAD_SECONDS)
            args = {"lora_id": number, "path": folder}
            await self._client.collective_rpc("load_lora", args, LOAD_SECONDS)
        except MoeEngineError as error:
            if isinstance(error, EngineDeadError) and not self._client.health().alive:
                raise
            await self._client.ask_ranks("unload_lora", {"lora_id": number})
            return self._failed(str(error))
        finally:
            self._in_transit.discard(name)
        self._by_name[name] = ServedAdapter(number, name, folder, key, pinned)
        logger.info("LoRA adapter %s loaded from %s", name, folder)
        return AdapterChange(True, f"adapter {name} is loaded", self.paths)

    def _why_not_load(self, name: str, pinned: bool) -> str | None:
        settings = self._settings
        if settings is None:
            return "this server runs without --enable-lora"
        if name in self._by_name or name in self._in_transit:
            return f"lora_name: an adapter {name!r:.80} is loaded already; unload it first, or use another name"
        if name in ("default", self._client.info.served_model_name, self._client.info.model_path):
            return f"lora_name: {name!r:.80} is a name of the base model"
        count = len(self._by_name) + len(self._in_transit) + self._num_draining
        if settings.max_loaded is not None and count >= settings.max_loaded:
            return f"{count} adapters are loaded, the limit of --max-loaded-loras; unload one first"
        num_pinned = sum(adapter.pinned for adapter in self._by_name.values())
        if pinned and num_pinned + 1 >= settings.num_slots:
            return (
                f"pinned: {num_pinned} adapters are pinned, and one of the {settings.num_slots} slots "
                "(--max-loras-per-batch) must stay free for the others"
            )
        return None

    async def unload(self, name: str) -> AdapterChange:
        """Unloads an adapter on all ranks once the requests that use it have ended."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            return self._failed(str(self._unknown("lora_name", f"lora_name: {name!r:.80}")))
        self._num_draining += 1
        try:
            if adapter.num_users:
                await adapter.idle.wait()
            await self._client.call("retire_lora", lora_id=adapter.id)
            await self._client.collective_rpc("unload_lora", {"lora_id": adapter.id})
        except MoeEngineError as error:
            if isinstance(error, EngineDeadError) and not self._client.health().alive:
                raise
            return self._failed(str(error))
        finally:
            self._num_draining -= 1
        logger.info("LoRA adapter %s unloaded", name)
        return AdapterChange(True, f"adapter {name} is unloaded", self.paths)

    def _failed(self, message: str) -> AdapterChange:
        return AdapterChange(False, message, self.paths)
