"""The sampler: gathers sampling parameters and random numbers of a step's rows, and calls the sampling kernel
(kernels/sampling).

A row's token depends on its own logits, parameters, seed and position, never on other rows. A row may occur several
times in a step with different lengths (the nodes of a draft tree); its random numbers then differ by length only.

Legend: S sampled rows, V vocabulary, J queried tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.sampling.protocol import INVALID_TOKEN as INVALID_TOKEN
from moe_engine.kernels.sampling.protocol import Draw, SamplingKernel, SamplingParameters
from moe_engine.kernels.sampling.reference import TorchSampling
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.logits_passes import UNBOUNDED, Head, LogitsPasses
from moe_engine.worker.sampling.sampling_state import SamplingState, uniforms


@dataclass(frozen=True)
class SampledRows:
    """The rows of a step that sample, in plan order; the same row may occur several times.

    Steps that sample the same rows share the `rows` object, which is never modified. `uniform`: the random numbers, for
    a step whose lengths are known on the device only; `lengths` then have no meaning, unless a logits processor needs
    them.
    """

    rows: np.ndarray  # [S] int64
    lengths: np.ndarray  # [S] int64: tokens before the sampled one, which is also its position
    rows_device: Tensor  # [S] int64
    uniform: Tensor | None = None  # [S] float32

    def part(self, rows: slice) -> SampledRows:
        """A slice; all rows give the same object."""
        if rows.start == 0 and rows.stop == len(self.rows):
            return self
        uniform = None if self.uniform is None else self.uniform[rows]
        return SampledRows(self.rows[rows], self.lengths[rows], self.rows_device[rows], uniform)


MAX_KNOWN = 4
"""Number of sets of rows with cached parameters: a step with drafts samples its rows, and every node of their trees."""


@dataclass(frozen=True)
class _Gathered:
    """The parameters of `rows`."""

    rows: np.ndarray
    parameters: SamplingParameters | None  # None: all greedy


class Sampler:
    """Samples tokens for the rows of a step, with the torch kernel unless another is given.

    Args:
        passes: max rows of logits at once.
    """

    def __init__(
        self,
        state: SamplingState,
        stream: DeviceStream,
        kernel: SamplingKernel | None = None,
        passes: LogitsPasses = UNBOUNDED,
    ) -> None:
        self.passes = passes
        self._state = state
        self._stream = stream
        self.kernel = kernel or TorchSampling()
        self._known: dict[int, _Gathered] = {}  # by the id of `rows`, which it keeps alive
        self._version = state.version

    def sample(self, logits: Tensor, sampled: SampledRows) -> Tensor:
        """logits [S, V], float32 or as the kernel reads them (not changed) -> tokens [S] int64, `INVALID_TOKEN` for
        invalid logits (NaN)."""
        parameters = self.parameters(sampled.rows)
        if parameters is None:
            return self.kernel.greedy(logits)
        uniform = self.uniforms(sampled) if sampled.uniform is None else sampled.uniform
        return self.kernel.sample(logits, parameters, uniform)

    def draw(self, head: Head, hidden: Tensor, sampled: SampledRows, sizes: StepSizes | None = None) -> Tensor:
        """hidden [S, D] -> tokens [S], as `sample` with the logits of the LM head, which takes `sizes`."""
        drawn = self.passes.over(head, hidden, sizes, lambda part, logits: self.sample(logits, sampled.part(part)))
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def probabilities(self, logits: Tensor, sampled: SampledRows, tokens: Tensor) -> Tensor:
        """tokens [S, J] int64 -> [S, J] float32: the probability that `sample` returns tokens[s, j] for logits[s].

        Greedy rows: 1 for the best token, else 0. Negative token ids: 0.
        """
        parameters = self.parameters(sampled.rows)
        if parameters is None:
            best = self.kernel.greedy(logits)[:, None]
            return ((tokens == best) & (tokens >= 0)).float()
        return self.kernel.probabilities(logits, parameters, tokens)

    def uniforms(self, sampled: SampledRows, salt: int = 0) -> Tensor:
        """The rows' random numbers of a stream (`sampling_state.uniforms`), [S] float32 on the device."""
        count = len(sampled.rows)
        staging = self._stream.staging((count + 1) // 2)
        staging.view(torch.float32)[:count].numpy()[:] = self.numbers(sampled.rows, sampled.lengths, salt)
        return self._stream.upload(staging).view(torch.float32)[:count]

    def numbers(self, rows: np.ndarray, positions: np.ndarray, salt: int = 0) -> np.ndarray:
        """The random numbers of rows [S] at positions [..., S], float32, on the host."""
        return uniforms(self._state.mixed_seed[rows], positions, salt)

    def parameters(self, rows: np.ndarray) -> SamplingParameters | None:
        """Sampling parameters of rows; None if all are greedy."""
        if self._version != self._state.version or len(self._known) > MAX_KNOWN:
            self._known.clear()
            self._version = self._state.version
        known = self._known.get(id(rows))
        if known is None:
            known = self._known[id(rows)] = _Gathered(rows, self._gather(rows))
        return known.parameters

    def _gather(self, rows: np.ndarray) -> SamplingParameters | None:
        """One upload: top_k as int64, then three rows of float32."""
        state, count = self._state, len(rows)
        draws = state.draw[rows]
        if not (draws != Draw.GREEDY).any():
            return None
        staging = self._stream.staging(count + (3 * count + 1) // 2)
        staging[:count].numpy()[:] = state.top_k[rows]
        floats = staging[count:].view(torch.float32).numpy()
        for i, values in enumerate((state.temperature, state.top_p, state.min_p)):
            floats[i * count : (i + 1) * count] = values[rows]
        device = self._stream.upload(staging)
        temperature, top_p, min_p = device[count:].view(torch.float32)[: 3 * count].split(count)
        return SamplingParameters(draws, temperature, top_p, min_p, device[:count], self._stream.asynchronous)
