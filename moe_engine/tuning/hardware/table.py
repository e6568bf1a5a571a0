"""GPUs and interconnects by name or by file. A user's own file has the fields of the files next to this module."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from moe_engine.errors import ConfigError
from moe_engine.kernels.device import Device
from moe_engine.planning.inputs.machine import Machine, usable_cores

FOLDER = Path(__file__).parent
T = TypeVar("T")
FORM_FACTOR = re.compile(r"-(sxm\d?|nvl(4|72)?|80gb)$")
"""Ends of names as vendors and clouds write them: GB200-NVL72, H100-SXM5."""
MOST_GPUS = 1 << 20
PCIE_BYTES_PER_S = 5.5e10
"""PCIe 5.0 with 16 lanes."""


@dataclass(frozen=True)
class GpuFacts:
    """A GPU by its data sheet: bytes, seconds and dense operations; rates of one direction.

    Attributes:
        flops: peak operations a second by dtype: ``bf16``, ``fp8``, ``fp4``.
        link_bytes_per_s, link_latency_us: to another GPU of the node.
        domain_size: GPUs that reach each other by NVLink.
        network: the interconnect between domains unless another is given.
        bus_bytes_per_s: from host memory.
        relative_flops: share of the peak that large products reach, over that of an H100.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    peak_bytes_per_s: float
    sustained_share: float
    nvlink: bool
    link_bytes_per_s: float
    link_latency_us: float
    gpus_per_node: int
    domain_size: int
    network: str
    relative_flops: float
    graph_node_us: float
    eager_launch_us: float
    flops: Mapping[str, float]
    bus_bytes_per_s: float = PCIE_BYTES_PER_S

    def rate(self, dtype: str) -> float:
        """Operations a second; a dtype without units of its own runs in the next wider one. The peak of the data sheet,
        scaled if products reach a different share of it than on an H100."""
        order = ("fp4", "fp8", "bf16")
        wider = order[order.index(dtype) :] if dtype in order else ("bf16",)
        return self.relative_flops * next(self.flops[each] for each in wider if each in self.flops)

    @property
    def arch(self) -> int:
        """The architecture number that Triton uses."""
        return 10 * self.capability[0] + self.capability[1]

    def machine(self, count: int | None = None, *, has_libraries: bool = False) -> Machine:
        """A host for `resolve` with `count` of these GPUs (None: as many as the flags need), with free memory.

        Args:
            has_libraries: the libraries of all kernel rows are installed there, not those of this machine.
        """
        return Machine(
            Device("cuda", self.name, self.capability, elsewhere=True, has_libraries=has_libraries),
            self.memory_bytes,
            self.memory_bytes,
            usable_cores(),
            "its data sheet",
            "that of the given GPU",
            unlinked=None if self.nvlink else f"{self.name} has no NVLink",
            num_devices=count,
        )


@dataclass(frozen=True)
class LinkFacts:
    """The network between nodes: bytes a second of one GPU and direction, and the latency of a message.

    `domain_size`: GPUs in a domain of this network's own (NVLink of a rack); 0: that of the GPU.
    """

    bytes_per_s: float
    latency_us: float
    domain_size: int = 0


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind and their network."""

    gpu: GpuFacts
    link: LinkFacts
    num_gpus: int
    gpu_key: str

    @property
    def domain_size(self) -> int:
        """GPUs that reach each other by NVLink."""
        return self.link.domain_size or self.gpu.domain_size

    @cached_property
    def machine(self) -> Machine:
        """A host with these GPUs and the libraries of `pip install -e '.[gpu]'`, for `resolve`."""
        return self.gpu.machine(has_libraries=True)


def gpu_names() -> list[str]:
    return sorted(path.stem for path in (FOLDER / "gpus").glob("*.toml"))


def find_gpu(name: str) -> GpuFacts:
    """One of `gpu_names`."""
    return _built_in("gpus", name, GpuFacts)


def link_names() -> list[str]:
    return sorted(path.stem for path in (FOLDER / "links").glob("*.toml"))


def parse_cluster(hardware: str, interconnect: str | None = None) -> Cluster:
    """``16xH200`` or ``16x/path/gpu.toml``, and the name or file of a network.

    Raises:
        ConfigError: an unknown name, a file that cannot be read, no number of GPUs.
    """
    found = re.fullmatch(r"(?:([0-9]+)\s*[x*]\s*)?(\S+)", hardware.strip(), re.IGNORECASE)
    if found is None or (found[1] and not 0 < int(found[1][:9]) <= MOST_GPUS):
        raise ConfigError(
            f"--hardware {hardware!r}: give a number of GPUs up to {MOST_GPUS} and their name, as in 16xH200"
        )
    name = found[2]
    known = [each for each in (name.lower(), FORM_FACTOR.sub("", name.lower())) if each in gpu_names()]
    if name.endswith(".toml"):
        gpu = _read(Path(name), GpuFacts, "--hardware")
    elif known:
        name = known[0]
        gpu = find_gpu(name)
    else:
        if turned := re.fullmatch(r"(\S+?)\s*[x*:]\s*([0-9]+)", name):
            raise ConfigError(f"--hardware {hardware}: write the number first, {turned[2]}x{turned[1]}")
        if (joined := re.fullmatch(r"([0-9]+)[ -]?(\S+)", name)) and joined[2].lower() in gpu_names():
            raise ConfigError(f"--hardware {hardware}: write an x behind the number, {joined[1]}x{joined[2]}")
        raise ConfigError(
            f"--hardware {hardware}: unknown GPU {name}; use one of {', '.join(gpu_names())}, or a TOML file with "
            "the fields of those in moe_engine/tuning/hardware/gpus"
        )
    return Cluster(gpu, parse_link(gpu.network if interconnect is None else interconnect), int(found[1] or 1), name)


def parse_link(name: str) -> LinkFacts:
    """A network by name or file. Raises ConfigError."""
    if name.endswith(".toml"):
        return _read(Path(name), LinkFacts, "--interconnect")
    if name not in link_names():
        raise ConfigError(
            f"--interconnect {name}: use one of {', '.join(link_names())}, or a TOML file with "
            "bytes_per_s and latency_us"
        )
    return _built_in("links", name, LinkFacts)


@lru_cache
def _built_in(folder: str, name: str, kind: type[T]) -> T:
    return _read(FOLDER / folder / f"{name}.toml", kind, "")


def _read(path: Path, kind: type[T], flag: str) -> T:
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{flag} {path}: cannot be read as TOML ({error})") from None
    names = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    required = {"bytes_per_s", "latency_us"} if kind is LinkFacts else set(names) - {"bus_bytes_per_s"}
    if missing := sorted(required - raw.keys()):
        raise ConfigError(f"{flag} {path}: {missing[0]} is missing; {kind.__name__} has {', '.join(names)}")
    if extra := sorted(raw.keys() - names.keys()):
        raise ConfigError(f"{flag} {path}: unknown field {extra[0]}; the fields are {', '.join(names)}")
    for name, value in raw.items():
        _check(path, flag, name, value)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$.")
        raise ConfigError(f"{flag} {path}: {place.rstrip('`')}: {problem}") from None


def _check(path: Path, flag: str, name: str, value: Any) -> None:
    """Every number is finite and positive."""
    for number in value.values() if isinstance(value, dict) else [value]:
        if isinstance(number, int | float) and not isinstance(number, bool):
            least = -1 if name == "domain_size" else 0
            if not least < number < math.inf:
                raise ConfigError(f"{flag} {path}: {name} must be above {least}, found {number}")
    if name == "flops" and (not isinstance(value, dict) or "bf16" not in value):
        raise ConfigError(f"{flag} {path}: flops needs bf16, as [flops] bf16 = 9.89e14")
