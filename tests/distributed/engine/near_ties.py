"""Draws that two correct runs may decide differently: their logits differ by rounding, and the random number or the
limit of top_p lies within that rounding of the boundary between two tokens. The oracle is transformers' model in
float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_engine.worker.sampling.sampling_state import mix64, uniforms

ROUNDING = 1e-5
"""Of a probability; runs in float32 differ by about 1e-6."""


@lru_cache(maxsize=4)
def _model(path: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )


def possible_tokens(path: Path, context: Sequence[int], sampling: Mapping[str, Any]) -> set[int]:
    """The tokens that may follow the context within `ROUNDING`. `sampling`: temperature, top_p, sampling_seed."""
    with torch.no_grad():
        logits = _model(path)(torch.tensor([list(context)])).logits[0, -1].numpy()
    if not sampling["temperature"]:
        return set(np.flatnonzero(logits >= logits.max() - ROUNDING).tolist())
    seed = np.array([mix64(sampling["sampling_seed"])], dtype=np.uint64)
    uniform = float(uniforms(seed, np.array([len(context)]))[0])
    weights = np.exp((logits - logits.max()) / sampling["temperature"])
    top_p = sampling.get("top_p", 1.0)
    limits = [top_p] if top_p == 1.0 else [top_p - ROUNDING, top_p, top_p + ROUNDING]
    return {
        _drawn(weights, limit, number)
        for limit, number in product(limits, (uniform - ROUNDING, uniform, uniform + ROUNDING))
    }


def _drawn(weights: np.ndarray, top_p: float, uniform: float) -> int:
    """The token where the running sum of the kept weights passes `uniform` times their total."""
    order = np.argsort(-weights, kind="stable")
    before = np.cumsum(weights[order]) - weights[order]
    kept = np.zeros_like(weights)
    inside = order[before < top_p * weights.sum()]
    kept[inside] = weights[inside]
    cdf = np.cumsum(kept)
    last = int(np.flatnonzero(kept)[-1])
    return min(last, int(np.searchsorted(cdf, max(uniform, 0.0) * cdf[-1], side="right")))
