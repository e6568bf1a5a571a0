"""Sampling with FlashInfer's kernels for the expensive parts: softmax, and top_k and top_p without sorting.

The library's own sampling takes seeds, ours one random number per row: tokens must not depend on the batch. So the
library filters the probabilities, ties at the limit are resolved as in the reference, and the draw is the reference's.
Legend: S sampled rows, V vocabulary, J queried tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.sampling.protocol import INVALID_TOKEN, Draw, SamplingParameters
from moe_engine.kernels.sampling.reference import first_argmax, invert
from moe_engine.kernels.sampling.scratch import MAX_ELEMENTS
from moe_engine.kernels.uploads import upload
from moe_engine.kernels.vendors.probe import FLASHINFER_SAMPLING


class FlashInferSampling:
    """`SamplingKernel`.

    Args:
        module: the library; default: the installed one.

    Raises:
        ImportError: the library is missing or lacks a required function.
    """

    name = "flashinfer"
    reads_half = False

    def __init__(self, module: Any | None = None) -> None:
        library = FLASHINFER_SAMPLING.load() if module is None else FLASHINFER_SAMPLING.check(module)
        self._lib = library.sampling

    def greedy(self, logits: Tensor) -> Tensor:
        value, index = first_argmax(logits)
        return torch.where(value.isfinite(), index, INVALID_TOKEN)

    def sample(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        return _in_batches(self._sample, logits, parameters, uniform)

    def probabilities(self, logits: Tensor, parameters: SamplingParameters, tokens: Tensor) -> Tensor:
        return _in_batches(self._probabilities, logits, parameters, tokens)

    def _sample(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        tokens, drawn = self.greedy(logits), parameters.draws != Draw.GREEDY
        if not drawn.any():
            return tokens
        sampled = invert(self._kept(logits, tokens, parameters), uniform[:, None])[:, 0]
        sampled = torch.where(tokens == INVALID_TOKEN, INVALID_TOKEN, sampled)
        return torch.where(upload(drawn, logits.device), sampled, tokens)

    def _probabilities(self, logits: Tensor, parameters: SamplingParameters, tokens: Tensor) -> Tensor:
        best, drawn = self.greedy(logits), parameters.draws != Draw.GREEDY
        place, known = tokens.clamp_min(0), tokens >= 0
        greedy = ((tokens == best[:, None]) & known).float()
        if not drawn.any():
            return greedy
        kept = self._kept(logits, best, parameters)
        share = kept.gather(1, place) / kept.sum(-1, keepdim=True, dtype=torch.float64)
        valid = known & (best != INVALID_TOKEN)[:, None]
        return torch.where(upload(drawn, logits.device)[:, None], torch.where(valid, share, 0.0).float(), greedy)

    def _kept(self, logits: Tensor, best: Tensor, p: SamplingParameters) -> Tensor:
        """[S, V] float32: unnormalized probabilities of each row; 0 outside its limits."""
        vocab = logits.shape[-1]
        # greedy rows (temperature 0) and invalid rows are handled elsewhere; here they only need harmless values
        logits = logits.masked_fill((best == INVALID_TOKEN)[:, None], 0.0).contiguous()
        temperature = torch.where(p.temperature > 0, p.temperature, 1.0).float()
        probs = self._lib.softmax(logits, temperature)
        weights, limited = probs, probs
        top_k = (p.draws == Draw.SMALL_TOP) | (p.draws == Draw.LARGE_TOP) | (p.draws == Draw.NUCLEUS)
        if top_k.any():
            counts = p.top_k.clamp_max(vocab)
            limited = self._lib.top_k_renorm_probs(probs, counts.to(torch.int32))
            limited = _first_of_equals(probs, limited, lambda value, above: counts[:, None] - above)
            limited = self._nucleus(probs, limited, p.top_p[:, None])
            weights = torch.where(upload(top_k, logits.device)[:, None], limited, probs)
        return weights.masked_fill(probs < p.min_p[:, None] * probs.amax(-1, keepdim=True), 0.0)

    def _nucleus(self, probs: Tensor, kept: Tensor, top_p: Tensor) -> Tensor:
        """`kept` [S, V] after top_k, cut to the smallest set of best tokens whose share reaches top_p [S, 1]."""
        total = kept.sum(-1, keepdim=True, dtype=torch.float64)
        shares = (kept / total).float()
        left = self._lib.top_p_renorm_probs(shares, top_p[:, 0].contiguous())
        goal = top_p * total

        def needed(value: Tensor, above: Tensor) -> Tensor:
            mass = kept.where(kept > value, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
            return ((goal - mass) / value).ceil().clamp_min(1).long()

        return torch.where(top_p < 1.0, _first_of_equals(kept, left, needed), kept)


def _in_batches(
    work: Callable[[Tensor, SamplingParameters, Tensor], Tensor], logits: Tensor, p: SamplingParameters, asked: Tensor
) -> Tensor:
    """Runs a bounded number of rows at a time: sampling needs several copies of their logits."""
    at_once = max(1, MAX_ELEMENTS // logits.shape[-1])
    if len(logits) <= at_once:
        return work(logits, p, asked)
    batches = []
    for begin in range(0, len(logits), at_once):
        part = slice(begin, begin + at_once)
        batches.append(work(logits[part], p.part(part), asked[part]))
    return torch.cat(batches)


def _first_of_equals(values: Tensor, left: Tensor, needed: Any) -> Tensor:
    """values [S, V] where `left` is not 0; of those equal to the smallest of them, only the first `needed` [S, 1].

    needed(value [S, 1], above [S, 1]): from the smallest kept value, and the number of greater ones.
    """
    least = values.where(left > 0, torch.inf).amin(-1, keepdim=True)
    equal = values == least
    above = (values > least).sum(-1, keepdim=True)
    crowd = equal & (equal.cumsum(-1, dtype=torch.int32) > needed(least, above))
    return values.masked_fill((values < least) | crowd, 0.0)
