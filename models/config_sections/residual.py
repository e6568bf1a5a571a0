"""What a model does to its residual besides adding results to it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class ResultNorms(NamedTuple):
    """Names of a layer's norms, if results of attention and feed-forward are normed before they are added to the
    residual (the defaults: Trinity). An empty one of `before_*`: the part reads the residual itself (OLMo 2); an empty
    one of `of_*`: its result is added as it is. `of_experts_only`: so are results of layers without experts (A.X K1).
    """

    before_attention: str = "input_layernorm"
    of_attention: str = "post_attention_layernorm"
    before_feed_forward: str = "pre_mlp_layernorm"
    of_feed_forward: str = "post_mlp_layernorm"
    of_experts_only: bool = False


@dataclass(frozen=True)
class ResidualScales:
    """The result of each norm is the residual too, and the next norm reads alpha * residual + beta * x, with x the
    result of the part between them (MiniMax-Text-01): (alpha, beta) of attention, layers with a state, experts."""

    attention: tuple[float, float]
    state: tuple[float, float]
    experts: tuple[float, float]
