"""Settings of worker and scheduler: captured and compiled steps, LoRA adapters, storage of KV."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """Which steps are captured as CUDA graphs before the first request.

    `sizes`: requests of a decode step, ascending; empty: no capture. `counts`: tokens of each request, above 1 if
    drafts are verified, in `trees` or chains. Without `pad` only steps of exactly these sizes are replayed. `hidden`:
    hidden states are kept although a step has its logits: for drafts, and for requests that return them.
    """

    sizes: tuple[int, ...] = ()
    counts: tuple[int, ...] = (1,)
    pad: bool = True
    trees: bool = False
    hidden: bool = True

    def size_for(self, num_requests: int) -> int | None:
        """Graph size that replays a step of `num_requests`, or None."""
        place = bisect.bisect_left(self.sizes, num_requests)
        if place == len(self.sizes) or not (self.pad or self.sizes[place] == num_requests):
            return None
        return self.sizes[place]

    def up_to(self, num_requests: int) -> GraphSettings:
        """These settings without sizes above `num_requests`, which no step reaches."""
        return replace(self, sizes=tuple(size for size in self.sizes if size <= num_requests))

    @property
    def num_graphs(self) -> int:
        return len(self.sizes) * len(self.counts)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest captured step."""
        return max(self.sizes, default=0) * max(self.counts)


@dataclass(frozen=True, slots=True)
class CompileSettings:
    """Which steps torch.compile compiles: decodes of up to `max_tokens` tokens; 0: none. `folder` caches compiled code;
    empty: the environment's folder, or the engine's default."""

    max_tokens: int = 0
    folder: str = ""


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """A LoRA adapter of the launch. `id` is positive and never reused. A `pinned` adapter keeps its slot."""

    id: int
    name: str
    path: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """LoRA adapters (--enable-lora).

    `num_slots`: adapters in one batch; `rank`: the largest; `targets`: last parts of the names of adapted modules;
    `max_loaded`: adapters in host memory, None: no limit; `adapters`: loaded at start.
    """

    num_slots: int
    rank: int
    targets: tuple[str, ...]
    backend: str = "auto"
    max_loaded: int | None = None
    adapters: tuple[LoraAdapter, ...] = ()


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """Storage below the host-RAM tier (--hicache-storage-backend).

    `backend`: name, or path of a class; `directory`: of backends with files; `max_bytes`: its limit, 0 for the
    backend's own; `extra`: a JSON object for the backend. Prefetching: `policy` (best_effort, wait_complete, timeout),
    `threshold`: fewer missing tokens are computed; `timeout_base` and `timeout_per_1024`: seconds.
    """

    backend: str
    directory: str = ""
    max_bytes: int = 0
    extra: str = ""
    policy: str = "timeout"
    threshold: int = 256
    timeout_base: float = 1.0
    timeout_per_1024: float = 0.25
