"""Formats of --quantization for checkpoints that are not quantized: weights are quantized while they are read.

The files are plain; kernels that multiply a form get the form, others get its values. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError
from moe_engine.kernels.weight_forms import FP8_BLOCKS, WeightForm
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.formats.block_fp8 import BLOCK_BYTES, KERNEL_BLOCK
from moe_engine.models.formats.module_rules import Modules
from moe_engine.models.formats.plain import PLAIN
from moe_engine.models.formats.protocol import Shape, StoredTensor, StoredTensors, WeightFormat
from moe_engine.models.formats.schemes import Scheme, SchemeFormat

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.codes import GroupCodes, PlainCodes
    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight

GROUPS = (32, 64, 128, 256)
"""Group sizes of int4, as in torchao's names."""
INT4_GROUP = 32
NAMES = ("fp8", "fp8wo", "int8", "int8wo", "int8dq", "int4")
_GROUPED = "int4wo-"
_READ_ELEMENTS = 1 << 22
_UNQUANTIZED = ("kv_b_proj", "o_a_proj", "compressor", "eh_proj", "lm_head", "shared_head")
"""Modules whose weights are held by head, or that checkpoints publish unquantized."""


@dataclass(frozen=True)
class Online(Scheme):
    """Plain in the files.

    Attributes:
        codes: the form for kernels, which quantize plain weights; None: FP8 blocks.
    """

    codes: PlainCodes | None

    @property
    def form(self) -> WeightForm:
        return FP8_BLOCKS if self.codes is None else self.codes.form

    def stored(self, prefix: str, names: Collection[str]) -> bool:
        return True

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        return PLAIN.tensors(prefix, shape, names)

    def bytes_per_element(self, shape: Shape) -> Fraction | None:
        if self.codes is not None:
            return Fraction(self.codes.num_bytes(1, shape[-1]), shape[-1]) if self.codes.takes(shape[-1]) else None
        return BLOCK_BYTES

    def kernel_format(self) -> KernelFormat:
        from moe_engine.kernels.quantization.protocol import BlockFP8

        return BlockFP8() if self.codes is None else self.codes

    def of_dtype(self, dtype: str) -> Online:
        if self.codes is None or dtype != "bfloat16":
            return self
        return replace(self, codes=replace(self.codes, plain=dtype))

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        if self.codes is not None:
            whole = cut.keeps_whole(shape, (1, self.codes.group or 1))
            return whole and self.codes.takes(cut.shape(shape)[1])
        return cut.keeps_whole(shape, KERNEL_BLOCK)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        """Reads what the kernel quantizes; else reads and quantizes some rows at a time. A Tensor gets the values of
        the quantized weight."""
        from torch import Tensor

        from moe_engine.kernels.quantization.codes import PlainWeight

        (stored,) = self.tensors(prefix, shape, source.names)
        if isinstance(out, PlainWeight):
            source.read_into(stored, cut, out.values)
            return
        n, k = cut.shape(shape)
        if isinstance(out, Tensor) and not self.keeps(source, prefix, shape, cut):
            source.read_into(stored, cut, out)
            return
        if isinstance(out, Tensor) and self.codes is None and _rounded(source, stored, cut, out):
            return
        form, first = self.kernel_format(), 0 if cut.rows is None else cut.rows.indices(shape[0])[0]
        step = max(128, _READ_ELEMENTS // max(1, k) // 128 * 128)
        for start in range(0, n, step):
            stop = min(n, start + step)
            part = Cut(slice(first + start, first + stop), cut.cols)
            _load_rows(form, source, stored, part, out, start, stop)


def _load_rows(
    form: KernelFormat, source: StoredTensors, stored: StoredTensor, cut: Cut, out: Any, start: int, stop: int
) -> None:
    import torch

    from moe_engine.kernels.quantization.codes import CodedWeight, GroupCodes
    from moe_engine.kernels.quantization.protocol import BlockWeight
    from moe_engine.kernels.quantization.quantize import quantize_codes
    from moe_engine.kernels.quantization.reference import dequantize_weight, quantize_weight

    place = out.device if isinstance(out, torch.Tensor) else out.scales.device
    plain = torch.empty(cut.shape(stored.shape), device=place)
    source.read_into(stored, cut, plain)
    if isinstance(out, CodedWeight):
        quantize_codes(plain, out.rows(start, stop))
    elif isinstance(out, BlockWeight):
        made, part = quantize_weight(plain), out.rows(start, stop)
        part.data.copy_(made.data)
        part.scales.copy_(made.scales)
    elif isinstance(form, GroupCodes):
        n, k = plain.shape
        coded = CodedWeight.empty(form, n, k, plain.device)
        quantize_codes(plain, coded)
        out[start:stop].copy_(coded.dequantized())
    else:
        out[start:stop].copy_(dequantize_weight(quantize_weight(plain)))


def _rounded(source: StoredTensors, stored: StoredTensor, cut: Cut, out: Tensor) -> bool:
    """Reads the weight and rounds it to FP8 in place; False if that is not the same as rounding what is stored."""
    from moe_engine.kernels.cpu.fp8_weights import fp8_rounding

    kept = {"BF16": "torch.bfloat16", "F32": "torch.float32"}.get(source.dtype_of(stored.name) or "")
    round_in_place = fp8_rounding(out) if str(out.dtype) == kept else None
    if round_in_place is None:
        return False
    source.read_into(stored, cut, out)
    round_in_place()
    return True


def online_format(name: str) -> SchemeFormat | None:
    """The format of a name of --quantization: fp8, int8, int4, or torchao's names; None for other names.

    Raises:
        ConfigError: a group size that is not available.
    """
    if name not in NAMES and not name.startswith(_GROUPED):
        return None
    rules = ((Modules(targets=(r"re:model\.layers\.",)), Online(_codes_of(name))),)
    return SchemeFormat("fp8" if name.startswith("fp8") else name, rules, Modules(parts=_UNQUANTIZED))


def derived_codes(format: WeightFormat, columns: int, is_head: bool = False) -> GroupCodes | None:
    """The form of a matrix that a layer holds in a layout of its own, one of kv_b's absorbed halves or the head; None:
    plain, as always on a GPU.

    4 bits if the projections have 4 and the columns form whole groups, else 8 bits. The head has 4 bits only with
    ``int4``: torchao's names leave it to the engine.
    """
    if not isinstance(format, SchemeFormat) or "linear" not in format.kept or format.on_gpu:
        return None
    codes = [scheme.codes for _, scheme in format.rules if isinstance(scheme, Online) and scheme.codes is not None]
    if not codes:
        return None
    wanted, wide = codes[0], _codes_of("int8")
    small = wanted.bits == 4 and wanted.takes(columns) and (not is_head or format.name == "int4")
    return wanted if small else wide


def _codes_of(name: str) -> PlainCodes | None:
    from moe_engine.kernels.quantization.codes import PlainCodes

    if name.startswith("fp8"):
        return None
    if name.startswith("int8"):
        return PlainCodes(8, 0, scales="float32")
    if name == "int4":
        return PlainCodes(4, INT4_GROUP)
    size = name.removeprefix(_GROUPED)
    if not size.isdigit() or int(size) not in GROUPS:
        raise ConfigError(f"--quantization {name}: the group size must be one of {', '.join(map(str, GROUPS))}")
    return PlainCodes(4, int(size))
