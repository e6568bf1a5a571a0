"""Experts on a shortcut (LongCat-Flash): of a pair of layers, they read the input of the first layer's MLP, and their
result is added to that of the second layer's MLP.

Between the two are the first MLP and the second layer's attention and MLP, which need nothing of the experts: with an
all-to-all and a comm stream (``--enable-single-batch-overlap``) tokens travel meanwhile.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.quantization.protocol import (
    UNQUANTIZED,
    Activation,
    ActivationFormat,
    common_format,
    unquantized,
)
from moe_engine.models.batch import RoutedTokens
from moe_engine.models.layers.feed_forward.mlp import MLP
from moe_engine.models.layers.feed_forward.moe import MoE
from moe_engine.models.layers.overlap_stages import Stages, finish
from moe_engine.parallel.dispatch.protocol import Phase
from moe_engine.parallel.dp_gather_scatter import TokenLayout


class Shortcut:
    """The experts' work of a pair of layers, from its start to its end. Holds no weights."""

    def __init__(self) -> None:
        self._stages: Stages | None = None
        self._result: Tensor | None = None

    def start(self, stages: Stages) -> None:
        """Runs the first stage. Work that has not ended belongs to a failed step."""
        self._stages, self._result = stages, None
        self.advance()

    def advance(self) -> None:
        """Runs the next stage."""
        if self._stages is None:
            return
        try:
            next(self._stages)
        except StopIteration as end:
            self._stages, self._result = None, end.value

    def end(self) -> Tensor:
        """The experts' result."""
        result = self._result if self._stages is None else finish(self._stages)
        assert result is not None, "a pair's first layer comes before its second"
        self._stages = self._result = None
        return result


class _Half:
    """A pair's MLP and experts may read other tokens: then the pair reads those of all ranks, and each rank adds a
    whole result of its own tokens to its partial sums."""

    def __init__(self, mlp: MLP, of_experts: TokenLayout) -> None:
        self.mlp, self._of_experts = mlp, of_experts
        self._alike = mlp.tokens is of_experts
        self.tokens = mlp.tokens if self._alike else TokenLayout.ALL

    def _through_mlp(self, x: Activation, phase: Phase, tokens: RoutedTokens | None) -> Tensor:
        """`MLP.forward` of its tokens, in the rows of the pair's."""
        if self.mlp.tokens is self.tokens:
            return self.mlp.forward(x, phase)
        out = torch.zeros_like(unquantized(x))
        out[_own(tokens)] = self.mlp.forward(unquantized(x)[_own(tokens)], phase)
        return out


class ShortcutStart(_Half):
    """`FeedForward` of a pair's first layer: its MLP, and the start of the experts."""

    def __init__(self, mlp: MLP, moe: MoE, shortcut: Shortcut) -> None:
        super().__init__(mlp, moe.tokens)
        self.moe, self._shortcut = moe, shortcut

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of x."""
        return common_format(self.mlp.input_format, self.moe.input_format)

    def forward(self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None) -> Tensor:
        own = x if self.moe.tokens is self.tokens else unquantized(x)[_own(tokens)]
        self._shortcut.start(self.moe.stages(own, phase, tokens))
        out = self._through_mlp(x, phase, tokens)
        self._shortcut.advance()
        return out


class ShortcutEnd(_Half):
    """`FeedForward` of a pair's second layer: its MLP, and the experts' result."""

    def __init__(self, mlp: MLP, of_experts: TokenLayout, shortcut: Shortcut) -> None:
        super().__init__(mlp, of_experts)
        self._shortcut = shortcut

    @property
    def input_format(self) -> ActivationFormat:
        """Activation format of x."""
        return self.mlp.input_format if self._alike else common_format(self.mlp.input_format, UNQUANTIZED)

    def forward(self, x: Activation, phase: Phase = "prefill", tokens: RoutedTokens | None = None) -> Tensor:
        out = self._through_mlp(x, phase, tokens)
        rows = out if self._of_experts is self.tokens else out[_own(tokens)]
        rows += self._shortcut.end()
        return out


def _own(tokens: RoutedTokens | None) -> slice:
    assert tokens is not None and tokens.own is not None
    return tokens.own
