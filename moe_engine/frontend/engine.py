"""Offline API: an engine inside a Python program, without a server.

The core runs in its own process, as under the server; requests pass through the same frontend. A daemon thread runs
the event loop, so that synchronous callers need none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from moe_engine import __version__, logs
from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, EngineDeadError
from moe_engine.frontend.client import CoreClient
from moe_engine.frontend.client_api import EngineInfo, Health, kernel_flags
from moe_engine.frontend.engine_loop import EngineLoop
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.offline_requests import encode_request, generate_request
from moe_engine.frontend.pausing import PauseMode, Pausing
from moe_engine.frontend.profiling import Profiling
from moe_engine.frontend.run_settings import RunSettingsOfAll
from moe_engine.frontend.scoring import ScoreResult, score
from moe_engine.frontend.served_adapters import AdapterChange
from moe_engine.frontend.start import frontend_settings, open_tokenizer, start_cores, wait_ready
from moe_engine.frontend.watchdog import watch
from moe_engine.frontend.weights.delete_checkpoint import delete_checkpoint
from moe_engine.frontend.weights.group_updates import GROUP, GROUP_SECONDS, GroupUpdates, Trainer
from moe_engine.frontend.weights.memory_release import MemoryReleases
from moe_engine.frontend.weights.weight_reads import read_weight
from moe_engine.frontend.weights.weight_updates import Updated, WeightUpdates
from moe_engine.planning.output.launch_flags import launch_flags
from moe_engine.planning.prepare import prepare
from moe_engine.server_args import ServerArgs
from moe_engine.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")
Output = dict[str, Any]

_END = object()


class Engine:
    """Text generation and embeddings with SGLang's offline interface.

    Args:
        model_path: a Hugging Face directory; None: the embedded demonstration model.
        server_args: all flags in one object, instead of the other arguments.
        flags: any flag of the server, as a keyword (``page_size=16``, ``dtype="float32"``).

    Raises:
        ConfigError: a flag, the model's config or its checkpoint is invalid; names it and the fix.
        EngineDeadError: the engine process failed to start.

    Example:
        >>> with Engine() as engine:
        ...     engine.generate("The capital of France is", {"temperature": 0, "max_new_tokens": 4})["text"]
        ' Paris.'
    """

    def __init__(self, model_path: str | None = None, *, server_args: ServerArgs | None = None, **flags: Any) -> None:
        if model_path is not None:
            flags["model_path"] = model_path
        if server_args is not None and flags:
            raise ConfigError(f"server_args has all flags of an engine: set {next(iter(flags))} there")
        quiet = {"log_level": "warning"} | flags
        args = EngineArgs.from_kwargs(**quiet) if server_args is None else server_args.engine_args()
        logs.setup_logging(args.logging.log_level)
        self.config = prepare(args)
        self._cores = start_cores(self.config)
        self._loop = EngineLoop(self._cores)
        try:
            tokenizer = open_tokenizer(self.config)  # while the core loads: a broken tokenizer fails early
            self._while_loading(tokenizer)
            self.info: EngineInfo = wait_ready(self._cores)
            delete_checkpoint(self.config)
            self._frontend: Frontend = self._loop.run(self._open(tokenizer))
            self._updates = WeightUpdates(self._frontend)
            self._settings = RunSettingsOfAll(self._frontend.client)
            self._memory = MemoryReleases(self._frontend, self._updates)
            self._groups = GroupUpdates(self._frontend, self._updates)
        except BaseException:
            self._loop.abandon()
            raise
        self._end = weakref.finalize(self, self._loop.abandon)

    def _while_loading(self, tokenizer: Tokenizer | None) -> None:
        """For the checks of subclasses; an exception ends the start."""

    async def _open(self, tokenizer: Tokenizer | None) -> Frontend:
        by_room = self.config.args.disaggregation.disaggregation_mode == "prefill"
        client = CoreClient(self._cores, self.info, self.config.load_balance_method, by_room=by_room)
        # No batch size limits: the memory is that of the caller's own process.
        settings = dataclasses.replace(frontend_settings(self.config), max_sequences=None, max_prompt_tokens=None)
        self._watchdog = asyncio.create_task(watch(client, self.config.server.watchdog_timeout))
        return Frontend(client, tokenizer, settings)

    # -- generation

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Output | list[Output] | Iterator[Output]:
        """Generates from a prompt, or from each of a list.

        Args:
            fields: the other fields of SGLang's ``/generate``: return_logprob, logprob_start_len, top_logprobs_num,
                token_ids_logprob, rid, priority, extra_key, ...

        Returns:
            ``{"text", "output_ids", "meta_info"}`` or a list of them; with `stream` an iterator of cumulative outputs.

        Raises:
            InputError: names the invalid field, or one that is not implemented yet.
            EngineDeadError: the engine process is dead.
            TypeError: an unknown field.
        """
        request = generate_request(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._iterate(request)
        return self._loop.run(self._frontend.generate(request))

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        stream: bool = False,
        **fields: Any,
    ) -> Output | list[Output] | AsyncIterator[Output]:
        """`generate` for asyncio, on any event loop; with `stream` the awaited value is an async iterator."""
        request = generate_request(prompt, sampling_params, input_ids, stream, fields)
        if stream:
            return self._aiterate(request)
        return await asyncio.wrap_future(self._loop.submit(self._frontend.generate(request)))

    def encode(
        self,
        prompt: str | list[str] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        dimensions: int | None = None,
        **fields: Any,
    ) -> Output | list[Output]:
        """The vector of a prompt, or of each of a list; the scores with a classification or reward model.

        Args:
            dimensions: the first numbers of each vector, normalized again.
            fields: the other fields of SGLang's ``/encode``: rid, priority, extra_key, ...

        Returns:
            ``{"embedding", "meta_info"}`` or a list of them.

        Raises:
            InputError: names the invalid field; or this engine generates text (`is_embedding`).
        """
        return self._loop.run(self._frontend.generate(encode_request(prompt, input_ids, dimensions, fields)))

    async def async_encode(
        self,
        prompt: str | list[str] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        dimensions: int | None = None,
        **fields: Any,
    ) -> Output | list[Output]:
        """`encode` for asyncio, on any event loop."""
        request = encode_request(prompt, input_ids, dimensions, fields)
        return await asyncio.wrap_future(self._loop.submit(self._frontend.generate(request)))

    def score(
        self,
        query: str | list[int],
        items: str | list[str] | list[list[int]],
        label_token_ids: list[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> ScoreResult:
        """Scores of items for a query, as `/v1/score`: ``scores`` has a list for each item.

        Args:
            label_token_ids: tokens whose probabilities after query and item are the scores; left out with a
                classification or reward model, which scores its own classes.
            apply_softmax: the scores of an item sum to 1.
            item_first: the item precedes the query.

        Raises:
            InputError: names the invalid argument.
        """
        return self._loop.run(score(self._frontend, query, items, label_token_ids, apply_softmax, item_first))

    async def async_score(
        self,
        query: str | list[int],
        items: str | list[str] | list[list[int]],
        label_token_ids: list[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
    ) -> ScoreResult:
        """`score` for asyncio, on any event loop."""
        scores = score(self._frontend, query, items, label_token_ids, apply_softmax, item_first)
        return await asyncio.wrap_future(self._loop.submit(scores))

    def _iterate(self, request: GenerateInput) -> Iterator[Output]:
        chunks = self._frontend.stream(request)
        try:
            while (chunk := self._loop.run(_next(chunks))) is not _END:
                yield chunk
        finally:
            if self._loop.is_open:
                self._loop.run(chunks.aclose())

    async def _aiterate(self, request: GenerateInput) -> AsyncIterator[Output]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        async def pump() -> None:
            async with aclosing(self._frontend.stream(request)) as chunks:
                async for chunk in chunks:
                    loop.call_soon_threadsafe(queue.put_nowait, chunk)

        def ended(task: Future[None]) -> None:
            cancelled = EngineDeadError("this Engine was shut down") if task.cancelled() else None
            with suppress(RuntimeError):  # the caller's loop is closed
                loop.call_soon_threadsafe(queue.put_nowait, cancelled or task.exception() or _END)

        task = self._loop.submit(pump())
        task.add_done_callback(ended)
        try:
            while (item := await queue.get()) is not _END:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            task.cancel()

    # -- control

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as `generate` tokenizes it."""
        if self._frontend.tokenizer is None:
            raise ValueError("this engine runs with skip_tokenizer_init: it has no tokenizer")
        return self._frontend.tokenizer.encode(text)

    def flush_cache(self) -> bool:
        """Clears the prefix cache; False while requests run."""
        return all(self._loop.run(self._frontend.client.call("flush_cache")))

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
    ) -> tuple[bool, str]:
        """Replaces the weights by a checkpoint of the same architecture, as `/update_weights_from_disk`: success, and a
        message. Running requests end first, or are aborted."""
        return self._updated(self._updates.update(model_path, load_format, weight_version, abort=abort_all_requests))

    def pause_generation(self, mode: PauseMode = "abort") -> int:
        """Stops computing, as `/pause_generation`: the number of requests that wait for `continue_generation`."""
        return self._loop.run(Pausing(self._frontend).pause(mode))

    def continue_generation(self) -> None:
        """Continues after `pause_generation`."""
        self._loop.run(Pausing(self._frontend).resume())

    def release_memory_occupation(self, tags: list[str] | None = None) -> tuple[bool, str]:
        """Releases memory of weights and KV cache, as `/release_memory_occupation`: success, and a message.

        Raises:
            InputError: without `enable_memory_saver=True`, or an unknown tag.
        """
        return self._updated(self._memory.release(tags))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> tuple[bool, str]:
        """Allocates released memory again, as `/resume_memory_occupation`: success, and a message."""
        return self._updated(self._memory.resume(tags))

    def set_internal_state(self, **server_args: Any) -> list[dict[str, Any]]:
        """Changes settings of the schedulers, as `/set_internal_state`: the values in force, by scheduler.

        Raises:
            InputError: names the setting that cannot have the value; nothing has changed.
        """
        return self._loop.run(self._settings.set(server_args))

    def get_internal_state(self) -> list[dict[str, Any]]:
        """The settings that can change, as `/get_internal_state`: `values` and `bounds`, by scheduler."""
        return self._loop.run(self._settings.get())

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> AdapterChange:
        """Loads a LoRA adapter, as `/load_lora_adapter`: `success`, `message` and the loaded `adapters`."""
        return self._loop.run(self._frontend.adapters.load(lora_name, lora_path, pinned))

    def unload_lora_adapter(self, lora_name: str) -> AdapterChange:
        """Unloads a LoRA adapter once the requests that use it have ended, as `/unload_lora_adapter`."""
        return self._loop.run(self._frontend.adapters.unload(lora_name))

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, Any]],
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
    ) -> tuple[bool, str]:
        """Replaces some weights, as `/update_weights_from_tensor`: success, and a message.

        Args:
            named_tensors: whole tensors with the names and shapes of the checkpoint.
            load_format: None or "auto". flush_cache: False is accepted, and the prefix cache is flushed all the same.
        """
        if load_format not in (None, "auto"):
            return False, f"load_format {load_format!r}: None or 'auto'"
        update = self._updates.update_tensors(
            lambda files: files.add_tensors(named_tensors), weight_version, abort=abort_all_requests
        )
        return self._updated(update)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP,
        backend: str = "nccl",
        *,
        timeout: float = GROUP_SECONDS,
    ) -> tuple[bool, str]:
        """Joins every rank to a group with a trainer, as `/init_weights_update_group`: success, and a message."""
        trainer = Trainer(master_address, master_port, rank_offset, world_size, group_name, backend)
        return self._updated(self._groups.init(trainer, timeout))

    def destroy_weights_update_group(self, group_name: str = GROUP) -> tuple[bool, str]:
        """Ends the membership, as `/destroy_weights_update_group`: success, and a message."""
        return self._updated(self._groups.destroy(group_name))

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str = GROUP,
        flush_cache: bool = True,
        *,
        weight_version: str | None = None,
        abort_all_requests: bool = False,
        timeout: float = GROUP_SECONDS,
    ) -> tuple[bool, str]:
        """Replaces weights by tensors that the trainer broadcasts, as `/update_weights_from_distributed`: success, and
        a message. `flush_cache`: False is accepted, and the prefix cache is flushed all the same."""
        update = self._groups.update(
            names, [str(dtype) for dtype in dtypes], shapes, group_name, weight_version,
            abort=abort_all_requests, seconds=timeout,
        )  # fmt: skip
        return self._updated(update)

    def _updated(self, work: Coroutine[Any, Any, Updated]) -> tuple[bool, str]:
        done = self._loop.run(work)
        return done.success, done.message

    def open_session(
        self, capacity_of_str_len: int = 0, session_id: str | None = None, streaming: bool = False,
        timeout: float | None = None,
    ) -> str:  # fmt: skip
        """The id of a new session, for `session_params` of `generate`. `capacity_of_str_len` has no effect."""
        return self._loop.run(_call(self._frontend.sessions.open, session_id, streaming=streaming, timeout=timeout))

    def close_session(self, session_id: str) -> None:
        """Deletes the requests of a session; closing a session that is not open has no effect."""
        self._loop.run(_call(self._frontend.sessions.close, session_id))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first `truncate_size` rows of a weight, by its name in the checkpoint, as nested lists; with several
        replicas a list of these.

        Raises:
            InputError: unknown name; with similar ones.
        """
        found = self._loop.run(read_weight(self._frontend.client, name, truncate_size))
        return found[0] if len(found) == 1 else found

    def get_memory_usage(self) -> list[dict[str, int]]:
        """Bytes that each rank holds, by purpose (`worker.memory_usage`)."""
        return self._loop.run(self._frontend.client.collective_rpc("memory_usage"))

    def start_profile(self, output_dir: str | None = None, profile_id: str | None = None, **options: Any) -> list[str]:
        """Starts a trace of every rank, as `/start_profile`; the paths. `options`: its other fields."""
        return self._loop.run(Profiling(self._frontend.client).start(output_dir, profile_id, options))

    def stop_profile(self) -> list[str]:
        """Ends the traces and writes them; the paths."""
        return self._loop.run(Profiling(self._frontend.client).stop())

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Aborts every request whose id starts with `rid`, or all. Does not wait for their end."""
        self._loop.submit(_call(self._frontend.abort, rid, all=abort_all))

    def get_server_info(self) -> dict[str, Any]:
        """The flags in effect (`planning.output.launch_flags`), the engine's facts and the state of each scheduler."""
        states = self._loop.run(self._frontend.client.call("internal_state"))
        facts = {
            "max_total_num_tokens": self.info.max_total_num_tokens,
            "max_req_input_len": self.info.max_req_input_len,
            "context_len": self.info.context_len,
            "version": __version__,
        }
        flags = launch_flags(self.config) | kernel_flags(self.info.backends)
        return {**flags, **facts, "internal_states": states}

    def health(self) -> Health:
        return self._frontend.client.health()

    def shutdown(self) -> None:
        """Aborts running requests and stops the engine process. Safe to call twice."""
        if not self._loop.begin_close():
            return
        self._end.detach()
        self._frontend.close()
        self._loop.close(self._shut_down())

    async def _shut_down(self) -> None:
        self._watchdog.cancel()
        await self._frontend.client.shutdown(drain=False)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


async def _call(function: Callable[..., T], *args: Any, **named: Any) -> T:
    """Calls the function on the event loop, which owns the state that it changes."""
    return function(*args, **named)


async def _next(chunks: Any) -> Any:
    return await anext(chunks, _END)
