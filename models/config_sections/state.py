"""Layers with a state of fixed size for each request, in the place of KV. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moe_engine.models.config_sections.rope import RopeConfig

STATE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Data types of `StatePart`, with the bytes of a number."""


@dataclass(frozen=True)
class StatePart:
    """A tensor of a request's state. dtype: torch's name (None: that of the activations). `sharded`: the dimension that
    is divided over the ranks of an attention group (None: each rank has the whole tensor)."""

    shape: tuple[int, ...]
    dtype: str | None = None
    sharded: int | None = None

    def num_bytes(self, activations: str) -> int:
        """Bytes of the part in one layer. activations: name of their dtype."""
        return math.prod(self.shape) * STATE_BYTES[self.dtype or activations]


@dataclass(frozen=True)
class StateGroup:
    """Layers without KV that keep a state of fixed size for each request (recurrent layers, linear attention).

    `stores_any`: the layers store states according to `ForwardBatch.state_runs`, also those of tokens before the last,
    so that prefixes can be cached.
    """

    layers: tuple[int, ...]
    parts: tuple[StatePart, ...]
    stores_any: bool = False

    def num_bytes(self, activations: str) -> int:
        """Bytes of a request in all layers of the group."""
        return len(self.layers) * sum(part.num_bytes(activations) for part in self.parts)


@dataclass(frozen=True)
class ShortConvConfig:
    """Convolutions over the last tokens, between two gates (LFM2): channels, and taps of each."""

    width: int
    taps: int

    block = "conv"
    """Name of a layer's block in the checkpoint."""

    def state_groups(self, layers: tuple[int, ...]) -> tuple[StateGroup, ...]:
        """The states of the `layers` with convolutions, their last inputs; () without any."""
        part = StatePart((self.taps - 1, self.width), sharded=1)
        return (StateGroup(layers, (part,), stores_any=True),) if layers else ()


@dataclass(frozen=True)
class DeltaConfig:
    """Gated delta net (Qwen3-Next): key and value heads, their widths, taps of the convolution. `joined`: the
    checkpoint has two input projections, whose rows are in the order of the key heads; else four (Qwen3.5).
    `by_channel`: Kimi Delta Attention, with a decay for each channel of a key, and as many key heads as value heads.
    Then `low_rank` names those of decays (f) and output gates (g) that come from products of low rank, the others come
    from a whole matrix each. `bound`: as in `kernels.delta.protocol.DeltaShape`. `flat_rates`: the rates of decay are a
    vector in the checkpoint, whatever `low_rank` is (GLM-5.3-Flash). `sigmoid`: so is the output gate of a net whose
    decays are those of heads (Qwen3.8-Flash-Next); else SiLU. `additive`: Mamba2, whose groups are the key heads
    (Nemotron-H): one input projection; a convolution with a bias if `conv_bias`; step widths within `step_limits`.
    `taps` 0: lightning attention (MiniMax-Text-01), without convolution, as many key heads as value heads. `rope`: its
    q and k are normed by head and rotated, without SiLU (Ling 2.6). `norm_groups`: its results are normed in this many
    groups of adjacent heads. `eps`: epsilon of Mamba2's norm; 0: the model's."""

    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int
    joined: bool = True
    by_channel: bool = False
    low_rank: str = "fg"
    bound: float = 0.0
    flat_rates: bool = False
    sigmoid: bool = False
    additive: bool = False
    conv_bias: bool = False
    step_limits: tuple[float, float] | None = None
    rope: RopeConfig | None = None
    norm_groups: int = 1
    eps: float = 0.0

    @property
    def decays(self) -> int:
        """Decays of a value head."""
        return self.key if self.by_channel else 1

    @property
    def block(self) -> str:
        """Name of a layer's block in the checkpoint."""
        return "self_attn" if self.by_channel or not self.taps else "linear_attn"

    @property
    def a_log_shape(self) -> tuple[int, ...]:
        """Shape of the heads' rates of decay in the checkpoint."""
        if self.by_channel and self.low_rank == "fg" and not self.flat_rates:
            return 1, 1, self.value_heads, 1
        return (self.value_heads,)

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def state_parts(self) -> tuple[StatePart, ...]:
        """The convolution's last inputs, by key head (without taps none), and the memory of each value head."""
        mixed = 2 * self.key + self.shared * self.value
        memory = StatePart((self.value_heads, self.key, self.value), "float32", sharded=0)
        tail = StatePart((self.key_heads, self.taps - 1, mixed), sharded=0)
        return (tail, memory) if self.taps else (memory,)

    def state_groups(self, layers: tuple[int, ...]) -> tuple[StateGroup, ...]:
        """The states of the `layers` with this net; () without any."""
        return (StateGroup(layers, self.state_parts, stores_any=True),) if layers else ()
