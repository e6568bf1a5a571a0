"""Formats that store each module by its own scheme, or unquantized. Imports no torch.

A scheme describes how one matrix is stored; `SchemeFormat` is the `WeightFormat` that selects a matrix's scheme.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, Self

from moe_engine.kernels.weight_forms import CODES, FORMS, FOUR_BITS, Multiplied, WeightForm, families
from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.formats.module_rules import NONE, Modules, every_expert
from moe_engine.models.formats.plain import FLOATS, PLAIN
from moe_engine.models.formats.protocol import FAMILIES, Shape, StoredTensor, StoredTensors, WeightFormat, family_of

if TYPE_CHECKING:
    from torch import Tensor

    from moe_engine.kernels.quantization.protocol import KernelFormat, QuantizedWeight


_SCALES = ("scales", "weight_scale")
"""Last parts of the names of tensors of scales."""


class Scheme(ABC):
    """How one matrix [N, K] is stored. Arguments as in `WeightFormat`. By default weights are dequantized while
    loading, to values that do not depend on the model's dtype."""

    @property
    def extras(self) -> tuple[str, ...]:
        """Ends of the names of a matrix's tensors that have no parameters of the model."""
        return ()

    @property
    def form(self) -> WeightForm | None:
        """The form in which kernels may multiply it; None: only dequantized."""
        return None

    @abstractmethod
    def stored(self, prefix: str, names: Collection[str]) -> bool:
        """True if a checkpoint with these names stores the matrix in this scheme."""

    @abstractmethod
    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]: ...

    def bytes_per_element(self, shape: Shape) -> Fraction | None:
        """Memory in the kernels' form; None: only dequantized."""
        return None

    def kernel_format(self) -> KernelFormat | None:
        return None

    def of_dtype(self, dtype: str) -> Self:
        """For a model whose unquantized weights have this dtype."""
        return self

    def with_scales(self, dtype: str) -> Self:
        """For files whose scales have this dtype, by safetensors' name."""
        return self

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        return False

    @abstractmethod
    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        """As `WeightFormat.load`; marks every tensor of the matrix as read."""


@dataclass(frozen=True)
class SchemeFormat:
    """`WeightFormat` of checkpoints whose config names schemes and modules.

    Attributes:
        method: the name of the format in messages and in --quantization.
        rules: modules and their scheme; the first that contains a matrix applies.
        skipped: modules that are not quantized.
        kept: kernel families whose rows multiply some of the weights as stored, for the memory ledger. Not in the
            `repr`, which names pages in the storage: the order of a set differs between processes.
        held: the forms that are multiplied as stored, by family; also not in the `repr`.
        on_gpu: codes are those of `GroupCodes.four_bits`, in the memory of kernels of a GPU.
    """

    method: str
    rules: tuple[tuple[Modules, Scheme], ...]
    skipped: Modules = NONE
    kept: frozenset[str] = field(default=FAMILIES, repr=False)
    held: frozenset[tuple[str, WeightForm]] = field(default=frozenset(product(FAMILIES, FORMS)), repr=False)
    on_gpu: bool = False

    stores_head: ClassVar[bool] = False
    """True if a head may be multiplied as stored: its scheme is known from the files."""

    def of_dtype(self, dtype: str) -> SchemeFormat:
        """For a model whose unquantized weights have this dtype."""
        return replace(self, rules=tuple((modules, scheme.of_dtype(dtype)) for modules, scheme in self.rules))

    def with_stored(self, files: Mapping[str, WeightFile]) -> SchemeFormat:
        """For these files. Scales may have another dtype than the unquantized weights: GPTQModel and AutoRound write
        float16 for models in bfloat16; the first matrix of a rule stands for the others. Matrices may be unquantized
        although the config does not say so, such as those of MTP layers."""
        found: dict[Scheme, Scheme] = {}
        plain = set[str]()
        for name, file in files.items():
            prefix, _, end = name.rpartition(".")
            scheme = self.scheme_of(prefix) if end in (*_SCALES, "weight") else None
            if scheme is None or (end in _SCALES and scheme in found):
                continue
            header = file.tensors[name]
            if not scheme.stored(prefix, files):
                plain |= {every_expert(prefix)} if header.dtype in FLOATS and len(header.shape) == 2 else set()
            elif end in _SCALES:
                found[scheme] = scheme.with_scales(header.dtype)
        rules = tuple((modules, found.get(scheme, scheme)) for modules, scheme in self.rules)
        return replace(self, rules=rules, skipped=replace(self.skipped, named=self.skipped.named | plain))

    def held_by(self, multiplied: Multiplied) -> WeightFormat:
        forms = {scheme.form for _, scheme in self.rules if scheme.form is not None}
        held = frozenset((family, form) for family, known in multiplied.items() for form in known & forms)
        on_gpu = FOUR_BITS in forms and bool(families(multiplied, FOUR_BITS) - families(multiplied, CODES))
        kept = frozenset(family for family, _ in held)
        return replace(self, kept=kept, held=held, on_gpu=on_gpu) if kept else PLAIN

    @property
    def name(self) -> str:
        return self.method

    def scheme_of(self, prefix: str) -> Scheme | None:
        """The scheme of a matrix by the config; None: not quantized."""
        if prefix in self.skipped:
            return None
        return next((scheme for modules, scheme in self.rules if prefix in modules), None)

    def _stored(self, prefix: str, names: Collection[str]) -> Scheme | None:
        """The scheme in which a checkpoint stores a matrix; the files take precedence over the config, if a scheme has
        tensors that show it."""
        scheme = self.scheme_of(prefix)
        if scheme is not None and scheme.stored(prefix, names):
            return scheme
        seen = (other for _, other in self.rules if other.extras and other.stored(prefix, names))
        found = next(seen, None)
        if found is not None or f"{prefix}.weight" in names:
            return found
        return scheme

    def tensors(self, prefix: str, shape: Shape, names: Collection[str]) -> tuple[StoredTensor, ...]:
        return (self._stored(prefix, names) or PLAIN).tensors(prefix, shape, names)

    def is_scale(self, name: str) -> bool:
        return any(name.endswith(scheme.extras) for _, scheme in self.rules)

    def bytes_per_element(self, prefix: str, shape: Shape, dtype_bytes: int) -> Fraction:
        family, found = family_of(prefix), None
        scheme = self.scheme_of(prefix) if family in self.kept else None
        if scheme is not None and (family, scheme.form) not in self.held:
            scheme = None
        form: Any = scheme.kernel_format() if scheme is not None and scheme.form in (CODES, FOUR_BITS) else None
        if form is not None and not form.takes(shape[-1]):
            scheme = None
        if scheme is not None and form is not None and self.on_gpu:
            found = form.bytes_on_gpu()
            if form.nvfp4 and family == "linear":  # a float32 factor for each row
                found += Fraction(4, shape[-1])
        elif scheme is not None:
            found = scheme.bytes_per_element(shape)
        return Fraction(dtype_bytes) if found is None else found

    def kernel_format(self, prefix: str) -> KernelFormat | None:
        scheme = self.scheme_of(prefix)
        return None if scheme is None else scheme.kernel_format()

    @property
    def has_kernel_formats(self) -> bool:
        return any(scheme.kernel_format() is not None for _, scheme in self.rules)

    def keeps(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut) -> bool:
        scheme = self._stored(prefix, source.names)
        return scheme is not None and scheme == self.scheme_of(prefix) and scheme.keeps(source, prefix, shape, cut)

    def load(self, source: StoredTensors, prefix: str, shape: Shape, cut: Cut, out: Tensor | QuantizedWeight) -> None:
        (self._stored(prefix, source.names) or PLAIN).load(source, prefix, shape, cut, out)


def every_linear(scheme: Scheme) -> tuple[tuple[Modules, Scheme], ...]:
    """The rule of checkpoints with one scheme."""
    return ((Modules(targets=("Linear",)), scheme),)
