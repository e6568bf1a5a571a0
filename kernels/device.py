"""Device capabilities for kernel selection: probed once, here, and passed on as a value."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass, replace
from functools import lru_cache

from moe_engine.kernels.weight_forms import WeightForm


@dataclass(frozen=True)
class Device:
    """kind ``cpu`` or ``cuda``; capability (major, minor) on CUDA; CPU flags by their Linux names.

    `elsewhere`: it belongs to another machine, where Triton counts as installed, since torch for CUDA brings it.
    `has_libraries`: so do the libraries of all rows (``plan --hardware``).
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    cpu_flags: frozenset[str] = frozenset()
    compiler: str | None = None
    elsewhere: bool = False
    has_libraries: bool = False

    @property
    def for_named_row(self) -> Device:
        """The device for a row that a flag names."""
        return replace(self, has_libraries=self.elsewhere)

    @property
    def with_own_libraries(self) -> Device:
        """The device with the libraries that are installed here."""
        return replace(self, has_libraries=False)

    @property
    def no_cuda(self) -> str | None:
        """The refusal reason of rows for CUDA devices; None on one."""
        return None if self.kind == "cuda" else f"needs a CUDA device, this one is {self.kind}"


@dataclass(frozen=True)
class HeadWidths:
    """A model's attention on one rank: query heads, KV heads, and channels of a key (rotary ones included), a value,
    the latent and its rotary part; the last two are 0 without a latent (GQA)."""

    heads: int
    groups: int
    key: int
    value: int
    latent: int = 0
    rotary: int = 0

    @property
    def result(self) -> int:
        """Channels of a head's result over the cache."""
        return self.latent or self.value


@dataclass(frozen=True)
class IndexWidths:
    """A model's indexer: heads, channels of a head, max selected tokens of a query token.

    `fp8_keys`: cached keys are FP8 records, also with latents of another type.
    """

    heads: int
    width: int
    top_k: int
    fp8_keys: bool = False


@dataclass(frozen=True)
class BlockIndexWidths:
    """The indexer of a model with block-sparse attention, on one rank: KV heads, channels of an index head, tokens of a
    block, max selected blocks of a query token, and how many of them are its last ones."""

    heads: int
    width: int
    size: int
    top_k: int
    local: int


@dataclass(frozen=True)
class ExpertWidths:
    """A model's routed experts on one rank: channels of a token and of an expert's part, experts of a token.

    `form`: in which the experts of all layers are stored; None: unquantized, or in several. `dispatched`: their rows
    come from a dispatcher. `fused`: it leaves exchange and products to one call.
    """

    hidden: int
    width: int
    top_k: int
    form: WeightForm | None = None
    dispatched: bool = False
    fused: bool = False


@dataclass(frozen=True)
class Need:
    """Requirements of the model and the launch on a backend: the activation dtype's name and the kinds of work.

    `widths` None: not known yet; no backend is refused for them. `other_widths`: of layers that differ.
    `deterministic`: results must be batch-invariant, bit for bit. `moe`: the model has MoE layers. `windows`: requests
    may exceed the sliding window of some layers. `chunked`: or their chunk.
    `capped`: attention bounds its scores. `spans`: tokens of an image attend to later ones of it.
    `sinks`: attention has sinks. `biases`: routed experts have biases, or an activation that is not SiLU's.
    `blocks`: the model's indexer, if it has block-sparse attention. `clamped`: the activation of experts is
    clamped, without biases. `index`: the model's indexer, if it has sparse attention. `delta`: layers with a gated
    delta rule. `compression`: the KV cache has compressed entries. `chains`: captured decodes draft chains, whose
    lengths only the device knows. `trees`: drafts are trees. `varlen`: a vision tower. `experts` None: not known
    yet, or none. `linear_forms`: of linear layers' weights with schemes in the checkpoint's config.
    """

    dtype: str
    kv_dtype: str = "auto"
    attention: str = "mla"
    page_size: int = 1
    widths: HeadWidths | None = None
    deterministic: bool = False
    moe: bool = True
    windows: bool = False
    index: IndexWidths | None = None
    blocks: BlockIndexWidths | None = None
    sinks: bool = False
    biases: bool = False
    clamped: bool = False
    delta: bool = False
    compression: bool = False
    chains: bool = False
    trees: bool = False
    varlen: bool = False
    experts: ExpertWidths | None = None
    linear_forms: frozenset[WeightForm] = frozenset()
    other_widths: tuple[HeadWidths, ...] = ()
    chunked: bool = False
    capped: bool = False
    spans: bool = False

    @property
    def most_selected(self) -> int:
        """Tokens to which a query token of sparse attention attends at most; 0: dense attention."""
        if self.blocks is not None:
            return self.blocks.size * self.blocks.top_k
        return 0 if self.index is None else self.index.top_k


@lru_cache
def cpu_device() -> Device:
    """This machine's CPU, its instruction sets and its C++ compiler (or None)."""
    flags: frozenset[str] = frozenset()
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                key, _, value = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    flags = frozenset(value.split())
                elif key.strip() == "model name":
                    name = value.strip()
                if flags and name:
                    break
    except OSError:
        pass
    return Device("cpu", name, None, flags, shutil.which("g++") or shutil.which("clang++"))


def probe(kind: str) -> Device:
    """The device of that kind. Raises ValueError if it does not exist."""
    if kind == "cpu":
        return cpu_device()
    import torch

    if not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu or check the driver")
    properties = torch.cuda.get_device_properties(0)
    return Device("cuda", properties.name, (properties.major, properties.minor), compiler=shutil.which("g++"))


def probe_or_absent(kind: str) -> Device:
    """As `probe`; if this machine has no device of that kind, one to compile for."""
    try:
        return probe(kind)
    except ValueError:
        return Device(kind, "absent")


@lru_cache
def starts_early(kind: str) -> bool:
    """Whether a device of that kind has programmatic dependent launches: CUDA from compute capability 9.0 on; True for
    ahead-of-time compilation."""
    if kind != "cuda":
        return kind != "cpu"
    capability = probe(kind).capability
    return capability is not None and capability >= (9, 0)


def multiplies_fp8(kind: str) -> bool:
    """Whether a device of that kind has e4m3 matrix products: CUDA from compute capability 8.9 on."""
    if kind != "cuda":
        return True  # the interpreter, and ahead-of-time compilation for devices with FP8 products
    capability = probe(kind).capability
    return capability is not None and capability >= (8, 9)
