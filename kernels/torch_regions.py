"""torch.compile regions: functions of tensors between kernels that torch cannot trace.

A function is compiled for steps of one token and for steps of several (dynamic token count); both happen before READY,
while `CompiledRegions.sealed` is unset. Layers that call it with weights of the same shapes share the result.
torch keeps compiled code in a folder (its AOTAutograd and FX graph caches), so a second start traces but does not
compile.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import cache_folder
from moe_engine.kernels.triton import guard

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


LEAST_CHUNK = 1 << 15
"""Min loop elements per CPU thread: waking a thread for torch's 512 costs more than a decode's loops."""


class CompiledRegions:
    """
    Args:
        max_tokens: max tokens of a compiled step; larger steps run eagerly.
        backend: torch.compile backend.
    """

    def __init__(self, max_tokens: int, backend: str = "inductor") -> None:
        self.max_tokens = max_tokens
        self.sealed = False
        """Set at the end of warm-up: shapes are no longer marked dynamic, and a compilation is a stall."""
        self._backend = backend
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}

    @property
    def num_functions(self) -> int:
        return len(self._compiled)

    def serves(self, num_tokens: int) -> bool:
        return 0 < num_tokens <= self.max_tokens

    def compile(self, function: Callable[..., Any], tokens: Sequence[int]) -> Callable[..., Any]:
        """The function, compiled on its first calls.

        Args:
            function: a plain function of weight-holding objects and tensors; torch must be able to trace all of it.
            tokens: indices of the arguments whose first dimension is the number of tokens.
        """
        if function not in self._compiled:
            self._compiled[function] = self._wrapped(function, tuple(tokens))
        return self._compiled[function]

    def _wrapped(self, function: Callable[..., Any], tokens: tuple[int, ...]) -> Callable[..., Any]:
        assert isinstance(function, FunctionType)
        # torch keys compiled code by the code object: a copy gives this engine a separate cache with separate limits
        own = FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, closure=function.__closure__
        )
        options: Any = {"cpp.min_chunk_size": LEAST_CHUNK} if self._backend == "inductor" else None
        compiled = torch.compile(own, fullgraph=True, backend=self._backend, options=options)

        def call(*args: Any) -> Any:
            if not self.sealed:
                _leave_open([args[place] for place in tokens])
            return compiled(*args)

        return call


def _leave_open(tensors: Sequence[Tensor]) -> None:
    """Marks the number of tokens as dynamic, unless it is 1, which torch specializes anyway."""
    for tensor in tensors:
        if tensor.shape[0] > 1:
            torch._dynamo.mark_dynamic(tensor, 0)


def keep_compiled_code(folder: str) -> Path:
    """Sets torch's compile cache folder for this process: the given folder, else torch's environment variable, else a
    folder in this engine's cache. Returns it."""
    chosen = Path(folder or os.environ.get(CACHE_VARIABLE) or cache_folder() / "torch_compile")
    chosen.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.environ[CACHE_VARIABLE] = str(chosen)
    return chosen


def watch() -> None:
    """Makes the guard count torch's compilations; idempotent."""
    handler = torch._dynamo.callback_handler
    if _started not in handler.start_callbacks:
        handler.register_start_callback(_started)
        handler.register_end_callback(_ended)


def loaded_and_compiled() -> tuple[int, int]:
    """(graphs loaded from the cache folder, graphs compiled) in this process so far."""
    counters = torch._dynamo.utils.counters["inductor"]
    return counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"]


_begins: list[float] = []


def _started(args: Any) -> None:
    _begins.append(time.perf_counter())


def _ended(args: Any) -> None:
    if _begins:
        guard.note(f"torch.compile region {args.compile_id}", time.perf_counter() - _begins.pop(), False)
