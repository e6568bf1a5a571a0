"""Names of the forms of quantized weights that kernels multiply as stored. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NewType

WeightForm = NewType("WeightForm", str)

CODES = WeightForm("codes")
"""`quantization.codes.GroupCodes` other than `FOUR_BITS`."""
FOUR_BITS = WeightForm("four_bits")
"""`quantization.codes.GroupCodes` with `four_bits`."""
FP8_BLOCKS = WeightForm("fp8_blocks")
"""`quantization.protocol.BlockFP8`."""
FP8_ROWS = WeightForm("fp8_rows")
"""`quantization.protocol.RowFP8`."""
FORMS = (CODES, FOUR_BITS, FP8_BLOCKS, FP8_ROWS)

Multiplied = Mapping[str, frozenset[WeightForm]]
"""Kernel family -> forms that its row multiplies as stored. Weights of other forms are dequantized while loading."""


def families(multiplied: Multiplied, *forms: WeightForm) -> frozenset[str]:
    """Kernel families whose rows multiply every one of these forms as stored; none without forms."""
    return frozenset(family for family, known in multiplied.items() if forms and known.issuperset(forms))
