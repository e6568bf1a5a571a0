"""The type of the KV cache that a quantized checkpoint was calibrated for: the default of ``--kv-cache-dtype``.

Names: `kv_cache_quant_algo` (ModelOpt's hf_quant_config.json) and `kv_cache_scheme` (compressed-tensors, and ModelOpt's
section of config.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FP8 = "FP8"


def kv_cache_scheme(raw: Mapping[str, Any]) -> str:
    """`FP8`, the name of another type, or "" for a checkpoint that states none.

    Args:
        raw: fields of config.json, with the settings of hf_quant_config.json.
    """
    section = raw.get("quantization_config") or raw.get("compression_config")
    if not isinstance(section, Mapping):
        return ""
    if algorithm := section.get("kv_cache_quant_algo"):
        return str(algorithm)
    scheme = section.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping):
        return scheme if isinstance(scheme, str) else ""  # ModelOpt up to 0.31
    bits, kind = scheme.get("num_bits", 8), scheme.get("type", "float")
    return FP8 if (bits, kind) == (8, "float") else f"{kind}{bits}"
