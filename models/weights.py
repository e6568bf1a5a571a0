"""Pull-based weight loading: a model requests tensors, or slices of them, with their expected shapes.

Bytes are read once, directly into the destination tensor if it has the file's dtype and is on the host. The
checkpoint's `WeightFormat` reads matrices: dequantized, or as stored for kernels that declare its form. Tensors that
were never requested are an error at the end (`finish`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from moe_engine.errors import CheckpointError
from moe_engine.kernels.host_memory import host_memory
from moe_engine.models.bar_output import BarOutput
from moe_engine.models.checkpoint.cut import UNCUT, Cut
from moe_engine.models.checkpoint.read_parts import PartReads
from moe_engine.models.checkpoint.safetensors_file import SafetensorsFile
from moe_engine.models.checkpoint.tensor_header import TensorHeader, WeightFile
from moe_engine.models.checkpoint_files import read_checkpoint
from moe_engine.models.finite import is_finite
from moe_engine.models.formats.plain import PLAIN, integer_tensor, plain_tensor
from moe_engine.models.formats.protocol import StoredTensor, WeightFormat
from moe_engine.models.formats.table import format_in_files, hint_for, supported_checkpoints
from moe_engine.models.gguf.file import GGUFFile
from moe_engine.models.gguf.names import GGUFWeights
from moe_engine.models.read_ahead import WINDOW_BYTES, Prefetch, ReadAhead, drop_cache, spans

ReadFiles = Callable[[Path], Mapping[str, WeightFile]]
"""A directory -> its tensors by name, with their files: `read_checkpoint`, or one that renames tensors."""


HOST = torch.device("cpu")
TABLE_DTYPES = ("F32", "BF16", "F16", "F8_E4M3", "F8_E8M0", "U8")
"""Types of mapped tables and their scales."""
REPORT_BYTES = 4 << 20
"""Bytes of files between two reports to the progress bar and the threads that read ahead."""
DEVICE_THREADS = 4
"""Min threads that read a tensor for a device."""


class WeightSource(Protocol):
    """Source of a layer's weights. `shape` is the full tensor's, as expected in the checkpoint.

    `format`: of the matrices of linear layers and experts. `made_up`: the values are not weights but markers of the
    elements' positions; no value may be added to them. `served_gates`: dtype of the routers' weights that the source
    replaces; None: it replaces none.
    """

    made_up: bool
    served_gates: torch.dtype | None

    dtype: torch.dtype
    device: torch.device
    format: WeightFormat

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = UNCUT,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """A newly allocated tensor on the device, cast to `dtype` (default: the activation dtype).

        Args:
            cut: the requested slice; only this is read.
            out: destination of the sliced shape, which is returned; its dtype takes precedence.
        """

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Any = None) -> Any:
        """The matrix `prefix` [N, K]: into a Tensor `out` dequantized, into a weight of the format's `kernel_format` as
        stored. Default: a newly allocated Tensor in the activation dtype. Returns `out`."""

    def mapped(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, str]:
        """A table [rows, bytes of a row] uint8 on the host, and its dtype's name. The bytes stay in the file, and are
        read when they are used, if the file can be mapped."""

    def keeps(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT) -> bool:
        """True if `linear` can read this slice into a weight of the format's `kernel_format`."""

    def gate_dtype(self, name: str) -> torch.dtype:
        """The dtype in which the weight of a router is kept: bfloat16 if its values are, else float32."""

    def has(self, name: str) -> bool:
        """True if the checkpoint has a tensor of that name."""

    def skip(self, name: str) -> None:
        """Marks a tensor as belonging to other ranks."""
        return None

    def skip_linear(self, prefix: str, shape: tuple[int, int]) -> None:
        """Marks the tensors of a matrix as belonging to other ranks."""
        return None

    def finish(self) -> None:
        """Ends loading. Raises CheckpointError if tensors remain that no layer requested."""
        return None


class TensorFile(Protocol):
    """`SafetensorsFile`, `GGUFFile`, or tensors in memory."""

    path: Path
    entries: dict[str, TensorHeader]

    def read(self, name: str, cut: Cut = UNCUT) -> Tensor: ...

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None: ...


class WeightReader:
    """`WeightSource` over the safetensors files of a checkpoint directory. Several threads may read concurrently.

    Args:
        directory: has model.safetensors, or an index and its shards; or the tensors themselves.
        dtype: the activation dtype of returned tensors.
        format: of the matrices, by config.json.
        ignore: returns the names that may stay unread (and do not count for the progress bar).
        progress: a bar with bytes, rate and remaining time on stderr.
        read: the tensors of the directory by name, with their files.
        prefetch: threads that read the files ahead of the caller, which reads all tensors or passes over them.
        drop: remove the files from the page cache at the end.
        finite: refuse tensors with values that are NaN or infinite.

    Attributes:
        num_bytes_read: bytes of tensors and scales read so far; only the slices of sliced tensors.

    Raises:
        CheckpointError: with file and tensor, expected and actual value, and the fix.
    """

    made_up = False

    def __init__(
        self,
        directory: str | Path | TensorFile,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        format: WeightFormat = PLAIN,
        ignore: Callable[[Collection[str]], Collection[str]] = lambda names: (),
        progress: bool = False,
        read: ReadFiles = read_checkpoint,
        prefetch: Prefetch | None = None,
        drop: bool = False,
        finite: bool = False,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._directory = Path(directory) if isinstance(directory, (str, Path)) else directory.path
        self._lock = threading.Lock()
        self.num_bytes_read = self._passed = self._shown = 0
        self.served_gates: torch.dtype | None = None
        self._drop, self._finite = drop, finite
        least = 1 if self.device == HOST else DEVICE_THREADS
        self._reads = PartReads(max(torch.get_num_threads(), least))
        weakref.finalize(self, self._reads.close)
        self._files = _open_files(directory, read, self._reads)
        self.format = format_in_files(format, self._files, lambda name: self._entry(name).shape)
        # A projection of width 0 (no shared experts, as saved by transformers) has no data and is never requested.
        self._unread = {name for name in self._files if self._entry(name).num_bytes}.difference(ignore(self._files))
        total = sum(self._entry(name).num_bytes for name in self._unread)
        self._bar = tqdm(
            total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="Loading weights", file=BarOutput(),
            disable=not progress,
        )  # fmt: skip
        self._ahead: ReadAhead | None = None
        if prefetch is not None:
            window = min(WINDOW_BYTES, host_memory().available_bytes // 4)
            self._ahead = ReadAhead(spans(self._files, self._unread), prefetch, window)
            weakref.finalize(self, self._ahead.close)

    def gate_dtype(self, name: str) -> torch.dtype:
        """See the protocol. Raises CheckpointError: the served dtype does not hold the values."""
        stored = torch.bfloat16 if self.dtype_of(name) == "BF16" else torch.float32
        served = self.served_gates or stored
        if served == torch.bfloat16 and stored != served and name in self._files:
            values = torch.empty(self._entry(name).shape)
            self._files[name].read_into(name, UNCUT, values)
            if not torch.equal(values.to(served).float(), values):
                raise CheckpointError(
                    f"{self._files[name].path}: {name} is served in bfloat16, which does not hold its new values; send "
                    "it in bfloat16, or restart the server with these weights"
                )
        return served

    def has(self, name: str) -> bool:
        return name in self._files

    def skip(self, name: str) -> None:
        if name in self._unread:
            self._account(name, 0)

    def skip_linear(self, prefix: str, shape: tuple[int, int]) -> None:
        for stored in self.format.tensors(prefix, shape, self._files):
            self.skip(stored.name)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = UNCUT,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = torch.empty(cut.shape(shape), dtype=dtype or self.dtype, device=self.device)
        stored = plain_tensor if out.is_floating_point() else integer_tensor
        self.read_into(stored(name, shape), cut, out)
        return out

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Any = None) -> Any:
        if out is None:
            out = torch.empty(cut.shape(shape), dtype=self.dtype, device=self.device)
        self.format.load(self, prefix, shape, cut, out)
        return out

    def mapped(self, name: str, shape: tuple[int, int]) -> tuple[Tensor, str]:
        self._check(StoredTensor(name, shape, TABLE_DTYPES))
        file = self._files[name]
        if isinstance(file, SafetensorsFile):
            return file.mapped(name), self._entry(name).dtype
        return file.read(name).view(torch.uint8).view(shape[0], -1), self._entry(name).dtype

    def keeps(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT) -> bool:
        return self.format.keeps(self, prefix, shape, cut)

    # -- `StoredTensors`, for the format

    @property
    def names(self) -> Collection[str]:
        return self._files

    def dtype_of(self, name: str) -> str | None:
        return self._entry(name).dtype if name in self._files else None

    @contextmanager
    def open(self, tensor: StoredTensor, cut: Cut = UNCUT) -> Iterator[Tensor]:
        self._check(tensor)
        part = self._files[tensor.name].read(tensor.name, cut)
        self._check_values(tensor.name, part)
        yield part
        self._done(tensor.name, part.numel() * part.element_size())

    def read_into(self, tensor: StoredTensor, cut: Cut, out: Tensor) -> None:
        self._check(tensor)
        self._files[tensor.name].read_into(tensor.name, cut, out)
        self._check_values(tensor.name, out)
        entry = self._entry(tensor.name)
        self._done(tensor.name, entry.num_bytes * out.numel() // max(1, prod(entry.shape)))

    def finish(self) -> None:
        self.abandon()
        if self._drop:
            drop_cache({file.path for file in self._files.values()})
        left = sorted(self._unread)
        files = self._files
        self._files = {}
        if left:
            some = ", ".join(f"{name} ({files[name].path.name})" for name in left[:5])
            raise CheckpointError(
                f"{self._directory}: {len(left)} tensors belong to no layer of the model: {some}"
                f"{', ...' if len(left) > 5 else ''}; check that config.json belongs to these files"
            )

    def abandon(self) -> None:
        """Ends the threads of a load that has failed."""
        self._bar.close()
        self._reads.close()
        if self._ahead is not None:
            self._ahead.close()

    def _entry(self, name: str) -> TensorHeader:
        return self._files[name].entries[name]

    def _check(self, tensor: StoredTensor) -> None:
        name, shape = tensor.name, list(tensor.shape)
        if name not in self._files:
            raise CheckpointError(
                f"{self._directory}: tensor {name} of shape {shape} is missing; "
                "check that config.json belongs to these files and that no shard is missing"
            )
        entry, where = self._entry(name), self._files[name].path
        if not tensor.fits(entry.shape):
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(entry.shape)}, config.json implies {shape}; "
                "check that config.json belongs to these files"
            )
        if not tensor.takes(entry.dtype):
            raise CheckpointError(
                f"{where}: tensor {name} has dtype {entry.dtype}{hint_for(entry.dtype)}, expected one of "
                f"{', '.join(tensor.dtypes)}; use a checkpoint in {supported_checkpoints()}"
            )

    def _check_values(self, name: str, values: Tensor) -> None:
        if self._finite and not is_finite(values):
            raise CheckpointError(
                f"{self._files[name].path}: tensor {name} has values that are NaN or infinite in {values.dtype}"
            )

    def _done(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._account(name, num_bytes)

    def _account(self, name: str, num_bytes: int) -> None:
        """Marks a tensor as processed; progress includes the part that this rank skips."""
        self.num_bytes_read += num_bytes
        if name not in self._unread:
            return
        self._unread.discard(name)
        self._passed += self._entry(name).num_bytes
        self._shown += num_bytes
        if self._passed >= REPORT_BYTES or not self._unread:
            self._report()

    def _report(self) -> None:
        """Reports the bytes since the last report: `_passed` in the files, `_shown` of them read."""
        if self._ahead is not None:
            self._ahead.take(self._passed)
        self._bar.total -= self._passed - self._shown
        self._bar.update(self._shown)
        self._passed = self._shown = 0


def _open_files(directory: str | Path | TensorFile, read: ReadFiles, reads: PartReads) -> dict[str, TensorFile]:
    """Tensor name -> its file."""
    if not isinstance(directory, (str, Path)):
        return dict.fromkeys(directory.entries, directory)
    files = read(Path(directory))
    if not files:
        raise CheckpointError(
            f"{directory}: holds no *.safetensors, *.bin or *.pt file; download the checkpoint again, or use "
            "--load-format dummy"
        )
    opened: dict[Path, TensorFile] = {
        file.path: _open_file(file, reads) for file in {f.path: f for f in files.values()}.values()
    }
    return {name: opened[file.path] for name, file in files.items()}


def _open_file(file: WeightFile, reads: PartReads) -> TensorFile:
    if isinstance(file, GGUFWeights):
        return GGUFFile(file, reads)
    return SafetensorsFile(file, reads)
