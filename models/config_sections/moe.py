"""Experts of a layer, and their router. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.kernels.gate_form import SQUARED, GatedActivation


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts and their router; the fields from `score` on are those of `kernels.ops.protocol.RouterSpec`.

    `shared_width` is the width of the MLP of all shared experts together (0: none). `biased`: experts have biases
    and the activation of `kernels.experts.batch.ExpertBiases`, with `alpha` and `limit`; else a `limit` clamps gate
    (from above) and up of all experts (0: no clamp), and an `alpha` or `beta` gives all MLPs, of dense layers too, that
    `GatedActivation`. `layer_limits`, `shared_limits`: bounds of silu(gate) and of up, of the routed and of the shared
    experts of each layer (0: none; layers after the last one have none). `shared_gate`: the shared expert is multiplied
    by the sigmoid of a projection of its input. `hash_layers`: the first layers choose experts by token id, from a
    table. `latent`: channels of the routed experts, if not those of the hidden states; `latent_norm`: the sum of their
    results is normed there (Kimi K3). `dense_limit`: the `limit` of the MLPs of dense layers (GLM-5.3-Flash).
    `image_bias`: routers have another bias for image tokens (DeepSeek V4.1). `squared`: experts have no gate, and
    relu(x)^2 as activation (Nemotron-H). `num_zero`: zero experts, whose result is
    their input: the router chooses them like the `num_experts` others, after which they are numbered (LongCat-Flash).
    `scales_input`: the router's weight multiplies the input of the token's one expert, not its result (Llama 4).
    `jitter`: of the score ``sparsemixer`` (Phi-3.5-MoE). `normed`: see `NormedMoE` (Gemma 4). `shared_scale`: factor of
    the shared experts' result (Cohere 2). `sum_eps`: added to the sum by which weights are divided.
    """

    num_experts: int
    top_k: int
    width: int
    shared_width: int
    score: str
    has_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str | None = None
    renormalize: bool = False
    scale: float = 1.0
    bias_on_logits: bool = False
    biased: bool = False
    alpha: float = 0.0
    limit: float = 0.0
    beta: float = 0.0
    shared_gate: bool = False
    hash_layers: int = 0
    latent: int = 0
    latent_norm: bool = False
    layer_limits: tuple[float, ...] = ()
    shared_limits: tuple[float, ...] = ()
    dense_limit: float = 0.0
    image_bias: bool = False
    squared: bool = False
    num_zero: int = 0
    scales_input: bool = False
    jitter: float = 0.0
    normed: bool = False
    shared_scale: float = 1.0
    sum_eps: float = 1e-20

    @property
    def num_choices(self) -> int:
        """Experts that the router chooses from."""
        return self.num_experts + self.num_zero

    @property
    def of_all(self) -> GatedActivation | None:
        """The activation of all MLPs, if it is not SiLU (MiniMax-M3, Kimi K3, Nemotron-H)."""
        own = SQUARED if self.squared else GatedActivation(self.limit, self.alpha, self.beta)
        return None if self.biased or own.is_silu else own

    @property
    def clamped(self) -> bool:
        """True if `limit` clamps an activation without the other terms of `biased`."""
        own = self.limit != 0 and not self.biased and self.of_all is None
        return own or any(self.layer_limits + self.shared_limits)

    def activation(self, layer: int, shared: bool = False) -> GatedActivation:
        """Activation of a layer's routed experts without biases, or of its shared one."""
        if (own := self.of_all) is not None:
            return own
        limits = self.shared_limits if shared else self.layer_limits
        bound = -limits[layer] if layer < len(limits) else 0.0
        return GatedActivation(bound or (0.0 if self.biased else self.limit))

    def hashes(self, layer: int) -> bool:
        """True if the layer chooses experts by token id."""
        return layer < self.hash_layers

    def num_shared_slots(self, ep_size: int) -> int:
        """Shared experts, if they have the routed ones' width and may be slots of all ranks of an expert-parallel axis;
        0: the ranks rather split them. In slots each token uses them `ep_size` times: at most an eighth more work than
        the routed experts'."""
        count, rest = divmod(self.shared_width, self.width)
        apart = self.latent or self.scales_input or self.normed
        return 0 if rest or apart or 8 * count * (ep_size - 1) > self.top_k else count
