"""The DeepSeek-V3 architecture as a small model that trains quickly on a CPU.

It is written for training only: no cache, no sharding, whole sequences at a time. Weights live in float32 and every
matrix product runs in the compute dtype (bfloat16 by default). The parameter names are the hub names of a DeepSeek
checkpoint, except that the routed experts of one layer are stacked (`export.py` splits them).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoConfig:
    """The sizes of the model, named as in DeepSeek's config.json."""

    vocab_size: int = 1280
    hidden_size: int = 256
    intermediate_size: int = 576
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 48
    qk_rope_head_dim: int = 16
    v_head_dim: int = 48
    n_routed_experts: int = 32
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 4
    topk_group: int = 2
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.5
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048

    @property
    def num_key_value_heads(self) -> int:
        """Equal to the number of heads, as in DeepSeek's files."""
        return self.num_attention_heads

    def to_dict(self) -> dict[str, Any]:
        """The fields as a plain dictionary."""
        return asdict(self)


class Linear(nn.Module):
    """A matrix without bias, multiplied in the dtype of the activations."""

    def __init__(self, n_in: int, n_out: int, std: float | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in) * (n_in**-0.5 if std is None else std))

    def forward(self, x: Tensor) -> Tensor:
        """x · Wᵀ."""
        return F.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain; the statistics are float32."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Normalize the last axis; the result has `dtype`, or that of x."""
        f = x.float()
        f = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return f.to(dtype or x.dtype)


def rope_tables(length: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of every (position, pair), each [length, dim / 2]."""
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), inv_freq)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved RoPE: pairs are adjacent (2j, 2j+1). x is [batch, time, heads, dim]."""
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)


class Attention(nn.Module):
    """Multi-head latent attention in its expanded form."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        heads, nope, rope, v = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        self.q_a_proj = Linear(cfg.hidden_size, cfg.q_lora_rank)
        self.q_a_layernorm = RMSNorm(cfg.q_lora_rank)
        self.q_b_proj = Linear(cfg.q_lora_rank, heads * (nope + rope))
        self.kv_a_proj_with_mqa = Linear(cfg.hidden_size, cfg.kv_lora_rank + rope)
        self.kv_a_layernorm = RMSNorm(cfg.kv_lora_rank)
        self.kv_b_proj = Linear(cfg.kv_lora_rank, heads * (nope + v))
        self.o_proj = Linear(heads * v, cfg.hidden_size, std=(heads * v * 2 * (cfg.num_hidden_layers + 1)) ** -0.5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention over [batch, time, hidden]."""
        cfg = self.cfg
        b, t, _ = x.shape
        heads, nope, rope, v_dim = cfg.num_attention_heads, cfg.qk_nope_head_dim, cfg.qk_rope_head_dim, cfg.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, t, heads, nope + rope)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((cfg.kv_lora_rank, rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, t, heads, nope + v_dim)
        k_rope = rotate(k_rope[:, :, None], cos, sin).expand(b, t, heads, rope)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
        k = torch.cat((kv[..., :nope], k_rope), -1)
        v = F.pad(kv[..., nope:], (0, nope + rope - v_dim))  # the fast kernel needs equal widths
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return self.o_proj(o.transpose(1, 2)[..., :v_dim].reshape(b, t, heads * v_dim))


class MLP(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, hidden: int, width: int, std_out: float) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, width)
        self.up_proj = Linear(hidden, width)
        self.down_proj = Linear(width, hidden, std=std_out)

    def forward(self, x: Tensor) -> Tensor:
        """The gated feed-forward map."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Dispatch(torch.autograd.Function):
    """Copy every token to its K slots in expert order; backward sums the slots without atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        """x [T, D] -> [T·K, D] sorted by expert."""
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """Sum the K slots of every token."""
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Unsort(torch.autograd.Function):
    """Undo the expert order (a permutation, so backward is the forward permutation)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Rows of y back in token order."""
        ctx.save_for_backward(order)
        return y.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Rows of the gradient in expert order."""
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


class Router(nn.Module):
    """Sigmoid scores, selection by score + bias inside the best groups, weights from the plain scores (noaux_tc)."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.randn(cfg.n_routed_experts, cfg.hidden_size) * cfg.hidden_size**-0.5)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.n_routed_experts))
        self.load: Tensor = torch.zeros(cfg.n_routed_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> expert ids [T, K] and weights [T, K] (float32)."""
        cfg = self.cfg
        scores = F.linear(x.float(), self.weight).sigmoid()
        with torch.no_grad():
            biased = scores + self.e_score_correction_bias
            grouped = biased.unflatten(-1, (cfg.n_group, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(cfg.topk_group, -1).indices
            masked = torch.full_like(grouped, -torch.inf)
            picked = best[..., None].expand(-1, -1, grouped.shape[-1])
            masked.scatter_(1, picked, grouped.gather(1, picked))
            ids = masked.flatten(1).topk(cfg.num_experts_per_tok, -1).indices
            self.load = torch.bincount(ids.flatten(), minlength=cfg.n_routed_experts).float()
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * cfg.routed_scaling_factor

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Adjusts every expert's bias towards an even load (the auxiliary-loss-free update)."""
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()


class MoE(nn.Module):
    """Routed experts (weights stacked over experts) plus one shared expert."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__()
        self.cfg = cfg
        e, i, d = cfg.n_routed_experts, cfg.moe_intermediate_size, cfg.hidden_size
        std_out = (i * 2 * (cfg.num_hidden_layers + 1)) ** -0.5
        self.gate = Router(cfg)
        self.gate_up = nn.Parameter(torch.randn(e, 2 * i, d) * d**-0.5)
        self.down = nn.Parameter(torch.randn(e, d, i) * std_out)
        self.shared_experts = MLP(d, i * cfg.n_shared_experts, std_out)

    def forward(self, x: Tensor) -> Tensor:
        """Every token through its K experts: tokens sorted by expert, then one product per expert."""
        k = self.cfg.num_experts_per_tok
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat)
        order = ids.flatten().argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        parts = Dispatch.apply(flat, order, inverse, k).split([int(n) for n in self.gate.load.tolist()])
        outs = []
        for part, gate_up, down in zip(parts, self.gate_up.to(x.dtype).unbind(), self.down.to(x.dtype).unbind()):
            gate, up = (part @ gate_up.t()).chunk(2, -1)
            outs.append((F.silu(gate) * up) @ down.t())
        routed = Unsort.apply(torch.cat(outs), order, inverse).unflatten(0, (-1, k))
        routed = torch.bmm(weights.to(x.dtype)[:, None], routed).view_as(x)
        return routed + self.shared_experts(x)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each after a norm, on a float32 residual stream."""

    def __init__(self, cfg: DemoConfig, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.self_attn = Attention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        std_out = (cfg.intermediate_size * 2 * (cfg.num_hidden_layers + 1)) ** -0.5
        self.mlp: nn.Module = MLP(cfg.hidden_size, cfg.intermediate_size, std_out) if dense else MoE(cfg)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        """One block; h stays float32."""
        h = h + self.self_attn(self.input_layernorm(h, dtype), cos, sin)
        return h + self.mlp(self.post_attention_layernorm(h, dtype))


class MTPLayer(DecoderLayer):
    """The multi-token-prediction block: one MoE layer on (next token's embedding, hidden state)."""

    def __init__(self, cfg: DemoConfig) -> None:
        super().__init__(cfg, dense=False)
        self.enorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.hnorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.eh_proj = Linear(2 * cfg.hidden_size, cfg.hidden_size)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)})

    def combine(self, emb: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """The block's input: embedding in the first half of the columns, hidden state in the second."""
        return self.eh_proj(torch.cat((self.enorm(emb, dtype), self.hnorm(hidden, dtype)), -1)).float()


class DemoModel(nn.Module):
    """Embedding, decoder layers, final norm, head, and the MTP layer at index num_hidden_layers."""

    def __init__(self, cfg: DemoConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.cfg, self.dtype = cfg, dtype
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(
            DecoderLayer(cfg, i < cfg.first_k_dense_replace) for i in range(cfg.num_hidden_layers)
        )
        self.mtp = MTPLayer(cfg)
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size, std=0.02)
        self.cos: Tensor
        self.sin: Tensor
        cos, sin = rope_tables(cfg.max_position_embeddings, cfg.qk_rope_head_dim, cfg.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states after the final norm, [batch, time, hidden], in the compute dtype."""
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        h = self.embed_tokens(ids)
        for layer in self.layers:
            h = layer(h, cos, sin, self.dtype)
        return self.norm(h, self.dtype)

    def mtp_hidden(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """The MTP state at every position (after shared_head.norm): predicts the token after `next_ids`."""
        cos, sin = self.cos[: next_ids.shape[1]], self.sin[: next_ids.shape[1]]
        z = self.mtp.combine(self.embed_tokens(next_ids), hidden, self.dtype)
        return self.mtp.shared_head["norm"](self.mtp(z, cos, sin, self.dtype), self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores."""
        return self.lm_head(hidden)

    def routers(self) -> list[Router]:
        """All routers, the MTP layer's last."""
        return [m for m in self.modules() if isinstance(m, Router)]


def count_parameters(model: nn.Module) -> int:
    """Number of trained values; embedding and head counted once."""
    return sum(math.prod(p.shape) for p in model.parameters())
