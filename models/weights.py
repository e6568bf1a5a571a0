"""Pull-based weight loading: a model requests tensors, or slices of them, with their expected shapes.

Bytes are read once, directly from the mapped file into the destination tensor; the mapping's pages are released after
each tensor. Block-FP8 weights are dequantized, or returned as stored for kernels that support them. Tensors that were
never requested are an error at the end (`finish`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from moe_engine.errors import CheckpointError
from moe_engine.kernels.quantization.protocol import BLOCK, BlockWeight
from moe_engine.models.checkpoint_files import TensorHeader, read_checkpoint
from moe_engine.models.cut import UNCUT, Cut
from moe_engine.models.safetensors_file import SafetensorsFile
from moe_engine.models.tensors import FLOATS, FP8, SCALES, scale_of

_CHUNK_ELEMENTS = 1 << 22
_ONE_THREAD_ELEMENTS = 1 << 22


class WeightSource(Protocol):
    """Source of a layer's weights. `shape` is the full tensor's, as expected in the checkpoint.

    `power_of_two`: activations of block-FP8 products use power-of-two scales.
    """

    dtype: torch.dtype
    device: torch.device
    power_of_two: bool

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

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Tensor | None = None) -> Tensor:
        """`prefix`.weight [N, K] in the activation dtype, dequantized if it has a scale."""

    def keeps_blocks(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT) -> bool:
        """True if `blocks` supports this slice: stored as e4m3 in 128 x 128 blocks, none of them split."""

    def blocks(
        self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: BlockWeight | None = None
    ) -> BlockWeight:
        """`prefix`.weight as stored, with scales in float32; only if `keeps_blocks`."""

    def has(self, name: str) -> bool:
        """True if the checkpoint has a tensor of that name."""

    def skip(self, name: str) -> None:
        """Marks a tensor (and its scales) as belonging to other ranks."""

    def finish(self) -> None:
        """Ends loading. Raises CheckpointError if tensors remain that no layer requested."""


class WeightReader:
    """`WeightSource` over the safetensors files of a checkpoint directory. Several threads may read at once.

    Args:
        directory: has model.safetensors, or an index and its shards.
        dtype: the activation dtype of returned tensors.
        block: rows and columns per scale of a block-FP8 weight.
        power_of_two: the checkpoint's scale format is UE8M0, also for activations.
        ignore: returns the names that may stay unread (and do not count for the progress bar).
        progress: a bar with bytes, rate and remaining time on stderr.

    Attributes:
        num_bytes_read: bytes of tensors and scales read so far; only the slices of sliced tensors.

    Raises:
        CheckpointError: with file and tensor, expected and actual value, and the fix.
    """

    def __init__(
        self,
        directory: str | Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        block: tuple[int, int] = (BLOCK, BLOCK),
        power_of_two: bool = False,
        ignore: Callable[[Collection[str]], Collection[str]] = lambda names: (),
        progress: bool = False,
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self._directory = Path(directory)
        self._block = block
        self.power_of_two = power_of_two
        self._lock = threading.Lock()
        self.num_bytes_read = 0
        self._files = _open_files(self._directory)
        # A projection of width 0 (no shared experts, as saved by transformers) has no data and is never requested.
        self._unread = {name for name in self._files if self._entry(name).num_bytes}.difference(ignore(self._files))
        total = sum(self._entry(name).num_bytes for name in self._unread)
        self._bar = tqdm(
            total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="Loading weights", file=sys.stderr,
            disable=not progress,
        )  # fmt: skip

    def has(self, name: str) -> bool:
        return name in self._files

    def skip(self, name: str) -> None:
        for unread in (name, scale_of(name, self._files)):
            if unread in self._unread:
                self._account(unread, 0)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: Cut = UNCUT,
        *,
        dtype: torch.dtype | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        part = self._part(name, shape, FLOATS, cut)
        if out is None:
            out = torch.empty(part.shape, dtype=dtype or self.dtype, device=self.device)
        _copy(out, part)
        self._done(name, part.numel() * part.element_size())
        return out

    def linear(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: Tensor | None = None) -> Tensor:
        name = prefix + ".weight"
        scale_name = scale_of(name, self._files)
        if scale_name is None:
            return self.tensor(name, shape, cut, out=out)
        part = self._part(name, shape, (*FP8, *FLOATS), cut)
        if out is None:
            out = torch.empty(part.shape, dtype=self.dtype, device=self.device)
        dequantize_into(out, part, self._scale(scale_name, shape), self._block, cut)
        self._done(name, part.numel() * part.element_size())
        return out

    def keeps_blocks(self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT) -> bool:
        name = prefix + ".weight"
        if scale_of(name, self._files) is None or self._block != (BLOCK, BLOCK):
            return False
        return self._entry(name).dtype == "F8_E4M3" and cut.keeps_blocks_whole(shape)

    def blocks(
        self, prefix: str, shape: tuple[int, int], cut: Cut = UNCUT, *, out: BlockWeight | None = None
    ) -> BlockWeight:
        name = prefix + ".weight"
        scale_name = scale_of(name, self._files)
        assert scale_name is not None
        part = self._part(name, shape, FP8, cut)
        if out is None:
            out = BlockWeight.empty(part.shape[0], part.shape[1], self.device, self.power_of_two)
        out.scales.copy_(cut.in_blocks().of(self._scale(scale_name, shape)))
        _copy(out.data, part)
        self._done(name, part.numel() * part.element_size())
        return out

    def finish(self) -> None:
        self._bar.close()
        left = sorted(self._unread)
        files = self._files
        self._files = {}
        if left:
            some = ", ".join(f"{name} ({files[name].path.name})" for name in left[:5])
            raise CheckpointError(
                f"{self._directory}: {len(left)} tensors belong to no layer of the model: {some}"
                f"{', ...' if len(left) > 5 else ''}; check that config.json belongs to these files"
            )

    def _scale(self, name: str, shape: tuple[int, int]) -> Tensor:
        """The scale grid in float32. uint8 is e8m0: value 2^(byte - 127)."""
        grid = (-(-shape[0] // self._block[0]), -(-shape[1] // self._block[1]))
        raw = self._part(name, grid, SCALES)
        scale = (raw.view(torch.float8_e8m0fnu) if raw.dtype == torch.uint8 else raw).to(torch.float32, copy=True)
        self._done(name, raw.numel() * raw.element_size())
        return scale

    def _entry(self, name: str) -> TensorHeader:
        return self._files[name].entries[name]

    def _check(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str]) -> None:
        if name not in self._files:
            raise CheckpointError(
                f"{self._directory}: tensor {name} of shape {list(shape)} is missing; "
                "check that config.json belongs to these files and that no shard is missing"
            )
        entry, where = self._entry(name), self._files[name].path
        if entry.shape != tuple(shape):
            raise CheckpointError(
                f"{where}: tensor {name} has shape {list(entry.shape)}, config.json implies {list(shape)}; "
                "check that config.json belongs to these files"
            )
        if entry.dtype not in dtypes:
            hint = " (block FP8 needs a weight_scale_inv beside it)" if entry.dtype in FP8 else ""
            raise CheckpointError(
                f"{where}: tensor {name} has dtype {entry.dtype}{hint}, expected one of {', '.join(dtypes)}; "
                "use a bf16 or block-FP8 checkpoint"
            )

    def _part(self, name: str, shape: tuple[int, ...], dtypes: Sequence[str], cut: Cut = UNCUT) -> Tensor:
        """A view of a slice of a tensor, after checking its shape and dtype."""
        self._check(name, shape, dtypes)
        self._files[name].prefetch(name, cut)
        return cut.of(self._files[name].view(name))

    def _done(self, name: str, num_bytes: int) -> None:
        with self._lock:
            self._files[name].release(name)
            self._account(name, num_bytes)

    def _account(self, name: str, num_bytes: int) -> None:
        """Marks a tensor as processed; progress includes the part that this rank skips."""
        self.num_bytes_read += num_bytes
        if name in self._unread:
            self._unread.discard(name)
            self._bar.total -= self._entry(name).num_bytes - num_bytes
            self._bar.update(num_bytes)


def dequantize_into(out: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], cut: Cut) -> None:
    """out[r, c] = weight[r, c] * scale[r div block, c div block], a bounded number of rows at a time.

    `weight` is the slice `cut` of a tensor with full scale grid `scale`; blocks at the edges are smaller.
    """
    weight, scale = weight.to(out.device), scale.to(out.device)
    num_rows, num_cols = weight.shape
    first_row, first_col = _first(cut.rows), _first(cut.cols)
    row_block = (torch.arange(num_rows, device=out.device) + first_row) // block[0]
    col_block = (torch.arange(num_cols, device=out.device) + first_col) // block[1]
    step = max(1, _CHUNK_ELEMENTS // max(1, num_cols))
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        grid = scale.index_select(0, row_block[start:stop]).index_select(1, col_block)
        out[start:stop].copy_(grid.mul_(weight[start:stop].float()))


def _copy(out: Tensor, part: Tensor) -> None:
    """out = part; same-dtype copies of moderate size use one thread, since waking others costs more than it saves."""
    plain = out.dtype == part.dtype and out.device == part.device and out.is_contiguous() and part.is_contiguous()
    if plain and 0 < part.numel() <= _ONE_THREAD_ELEMENTS:
        np.copyto(out.view(-1).view(torch.uint8).numpy(), part.view(-1).view(torch.uint8).numpy())
    else:
        out.copy_(part)


def _first(cut: slice | None) -> int:
    return (cut.start or 0) if cut else 0


def _open_files(directory: Path) -> dict[str, SafetensorsFile]:
    """Tensor name -> its file."""
    files = read_checkpoint(directory)
    if not files:
        raise CheckpointError(
            f"{directory}: holds no *.safetensors file; convert the checkpoint to safetensors, "
            "or use --load-format dummy"
        )
    opened = {file.path: SafetensorsFile(file) for file in {f.path: f for f in files.values()}.values()}
    return {name: opened[file.path] for name, file in files.items()}


def open_source(load_format: str, directory: str | Path, **kwargs: Any) -> WeightSource:
    """The source for a load format: ``auto`` and ``safetensors`` read files, ``dummy`` uses random weights.

    Raises:
        CheckpointError: for an unknown format.
    """
    if load_format in ("auto", "safetensors"):
        return WeightReader(directory, **kwargs)
    if load_format == "dummy":
        from moe_engine.models.dummy_weights import DummyReader

        return DummyReader(**kwargs)
    raise CheckpointError(f"--load-format {load_format}: use auto, safetensors or dummy (convert .pt/.bin files first)")
