"""Expected results of the kernels, in float64 and independent of their code; and tolerances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBiases
from moe_engine.kernels.gate_form import SILU, GatedActivation
from moe_engine.kernels.ops.protocol import RotaryTable, RouterSpec
from moe_engine.kernels.quantization.protocol import BlockWeight, QuantizedRows, RowWeight
from moe_engine.kernels.queries import PagedQueries

DTYPES = (torch.bfloat16, torch.float32)
NAN = float("nan")


def close(got: Tensor, want: Tensor, scale: float = 1.0) -> None:
    """Within rounding of the dtype, relative to the largest value; `scale` allows for intermediate roundings."""
    assert got.shape == want.shape
    if got.numel() == 0:
        return
    assert torch.isfinite(got).all()
    of_dtype = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 3e-6}[got.dtype]
    limit = of_dtype * scale * max(float(want.abs().max()), 1e-6)
    worst = float((got.double() - want).abs().max())
    assert worst <= limit, f"off by {worst:.3g}, allowed {limit:.3g}"


def by_row(weight: Tensor) -> RowWeight:
    """weight [N, K] in FP8 with a scale per row."""
    scales = weight.float().abs().amax(1) / 448
    return RowWeight((weight.float() / scales[:, None]).to(torch.float8_e4m3fn), scales)


def block_product(rows: QuantizedRows, weight: BlockWeight | RowWeight) -> Tensor:
    """rows @ weight.T of FP8 data: [M, N]."""
    n, k = weight.data.shape
    x = rows.data.double() * rows.scales.double().repeat_interleave(128, 1)[:, :k]
    if isinstance(weight, RowWeight):
        return x @ (weight.data.double() * weight.scales.double()[:, None]).t()
    scales = weight.scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return x @ (weight.data.double() * scales[:n, :k]).t()


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def drawn_scale() -> float:
    """A scale of latents (`k_scale`), exact in float32."""
    return float(torch.rand(()) * 4 + 0.01)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, form: GatedActivation = SILU) -> Tensor:
    """x [M, D], gate and up [I, D], down [D, I]."""
    x = x.double()
    return activated(x @ gate.double().T, x @ up.double().T, form) @ down.double().T


def activated(gate: Tensor, up: Tensor, form: GatedActivation) -> Tensor:
    """gate and up with the activation, which has no alpha; of halves of up both."""
    if form.squared:
        return torch.cat((gate, up), -1).clamp(min=0) ** 2
    if not form.beta:
        return bounded_silu(gate, up, form.limit)
    soft = form.limit * torch.tanh(up / form.limit) if form.limit else up
    return form.beta * torch.tanh(gate / form.beta) / (1 + torch.exp(-gate)) * soft


def bounded_silu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up, up within +-limit and gate at most the limit, or silu(gate) if it is negative; 0: no limit.
    -infinity: gelu(gate) * up."""
    if limit == -torch.inf:
        return gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    bound = abs(limit) or torch.inf
    active = silu(gate).clamp(max=bound) if limit < 0 else silu(gate.clamp(max=bound))
    return active * up.clamp(-bound, bound)


def biased(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, bias: ExpertBiases, expert: int) -> Tensor:
    """`gated` with biases and the clamped activation."""
    x, both = x.double(), bias.gate_up[expert].double()
    width = len(gate)
    first = (x @ gate.double().T + both[:width]).clamp(max=bias.limit)
    second = (x @ up.double().T + both[width:]).clamp(-bias.limit, bias.limit)
    inner = (second + 1) * first / (1 + (-bias.alpha * first).exp())
    return inner @ down.double().T + bias.down[expert].double()


def rotary_table(count: int, width: int, interleaved: bool) -> RotaryTable:
    angles = torch.arange(count).double()[:, None] * 10000 ** (-torch.arange(0, width, 2).double() / width)
    return RotaryTable(torch.cat((angles.cos(), angles.sin()), -1).float() * 1.25, interleaved)


def rotated(x: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
    """x [T, H, R]."""
    x = x.double()
    half = table.width // 2
    cos, sin = table.cos_sin[positions].double().unsqueeze(1).split(half, -1)
    first, second = (x[..., 0::2], x[..., 1::2]) if table.interleaved else (x[..., :half], x[..., half:])
    a, b = first * cos - second * sin, second * cos + first * sin
    return torch.stack((a, b), -1).flatten(-2) if table.interleaved else torch.cat((a, b), -1)


def router_scores(logits: Tensor, score: str) -> Tensor:
    """logits [T, E] float64."""
    if score == "sqrtsoftplus":
        return torch.logaddexp(logits, torch.zeros_like(logits)).sqrt()
    return torch.sigmoid(logits) if score == "sigmoid" else torch.softmax(logits, -1)


def with_bias(scores: Tensor, bias: Tensor | None, spec: RouterSpec) -> Tensor:
    """scores [T, E] with the bias by which experts are chosen."""
    return scores + bias.double() if spec.has_bias and bias is not None else scores.clone()


def of_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """choice [T, E] -> [T, G]: what the groups of experts are chosen by."""
    groups = choice.unflatten(-1, (spec.num_groups, -1))
    return groups.topk(2, -1).values.sum(-1) if spec.group_score == "top2" else groups.max(-1).values


def routed_weights(x: Tensor, gate: Tensor, bias: Tensor | None, spec: RouterSpec) -> Tensor:
    """[T, E]: the weight of every expert, 0 where it is not chosen."""
    logits = x.double() @ gate.double().T
    if spec.score == "sparsemixer":
        return _sparse_mixer(logits, spec)
    if spec.bias_on_logits and bias is not None:  # gpt-oss: a softmax over the chosen experts
        best = (logits + bias.double()).topk(spec.top_k, -1)
        return torch.zeros_like(logits).scatter_(-1, best.indices, best.values.softmax(-1))
    scores = router_scores(logits, spec.score)
    choice = with_bias(scores, bias, spec)
    if spec.group_score is not None:
        best = of_groups(choice, spec)
        keep = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(spec.topk_groups, -1).indices, True)
        choice = choice.unflatten(-1, (spec.num_groups, -1)).masked_fill(~keep.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = choice.topk(spec.top_k, -1).indices
    weights = scores.gather(-1, ids)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + spec.sum_eps)
    return torch.zeros_like(scores).scatter_(-1, ids, weights * spec.scale)


def _sparse_mixer(logits: Tensor, spec: RouterSpec) -> Tensor:
    """A token's choices one by one, each among experts whose relative distance to the best is small (Phi-3.5-MoE)."""
    weights = torch.zeros_like(logits)
    for token, row in enumerate(logits.tolist()):
        left = dict(enumerate(row))
        for _ in range(spec.top_k):
            chosen = max(left, key=lambda expert: left[expert])
            best = left[chosen]
            near = [own for own in left.values() if (best - own) / max(abs(own), best) <= 2 * spec.jitter]
            weights[token, chosen] = 1 / sum(math.exp(own - best) for own in near)
            del left[chosen]
    return weights


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """q [t, H, D], k [s, G, D], v [s, G, V]; the t queries are the last positions and attend to earlier ones; among
    each other as in seen [t, t]. Each of the G heads of keys and values belongs to H/G adjacent heads. sinks [H]:
    logits without a value."""
    groups = k.shape[1]
    products = torch.einsum("tgnd,sgd->gnts", q.double().unflatten(1, (groups, -1)), k.double())
    scores = products.flatten(0, 1) * scale
    t, s = scores.shape[1:]
    hidden = torch.arange(s)[None, :] > torch.arange(s - t, s)[:, None]
    if seen is not None:
        hidden = torch.cat((torch.zeros(t, s - t, dtype=torch.bool), ~seen), 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, t, 1)), -1)
    shares = torch.softmax(scores, -1)[..., :s].unflatten(0, (groups, -1))
    return torch.einsum("gnts,sgv->tgnv", shares, v.double()).flatten(1, 2)


def absorbed_attention(
    q: Tensor, cache: Tensor, queries: PagedQueries, scale: float, latent: int, trees: list[Tensor] | None = None
) -> Tensor:
    """MLA over latents: q [T, H, C+R], cache [slots, C+R] of numbers -> [T, H, C]. `trees`: as of `random_trees`."""
    parts = []
    for request, mine in enumerate(q.split(queries.query_lens)):
        keys = cache[slots_of(queries, request)].unsqueeze(1)
        parts.append(attend(mine, keys, keys[..., :latent], scale, None if trees is None else trees[request]))
    return torch.cat(parts)


def expanded_attention(q: Tensor, kv: Tensor, rope: Tensor, queries: PagedQueries, scale: float) -> Tensor:
    """MLA over keys and values of heads: q [T, H, N+R], kv [S, H, N+V], rope [S, R], contexts in order -> [T, H, V]."""
    parts, nope = [], q.shape[2] - rope.shape[1]
    contexts = zip(kv.split(queries.context_lens), rope.split(queries.context_lens))
    for mine, (own, tail) in zip(q.split(queries.query_lens), contexts):
        keys = torch.cat((own[..., :nope], tail.unsqueeze(1).expand(-1, q.shape[1], -1)), -1)
        parts.append(attend(mine, keys, own[..., nope:], scale))
    return torch.cat(parts)


def grouped_attention(
    q: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries, scale: float, trees: list[Tensor] | None = None
) -> Tensor:
    """GQA: q [T, H, D], keys [slots, G, D], values [slots, G, V] -> [T, H, V]. `trees`: as of `random_trees`."""
    parts = []
    for request, mine in enumerate(q.split(queries.query_lens)):
        slots = slots_of(queries, request)
        parts.append(attend(mine, keys[slots], values[slots], scale, None if trees is None else trees[request]))
    return torch.cat(parts)


def selected_attention(
    q: Tensor, cache: Tensor, slots: Tensor, counts: Sequence[int], scale: float, latent: int
) -> Tensor:
    """`absorbed_attention` of each token over `counts` [T] of the slots [T, *] that were selected for it."""
    parts = []
    for token, own, count in zip(q.split(1), slots, counts):
        keys = cache[own[:count].long()].unsqueeze(1)
        parts.append(attend(token, keys, keys[..., :latent], scale))
    return torch.cat(parts)


def close_rows(got: Tensor, want: Tensor, scale: float = 1.0) -> None:
    """`close`, relative to the largest value of each row."""
    for mine, expected in zip(got, want, strict=True):
        close(mine, expected, scale)


def close_each(got: Tensor, want: Tensor, queries: PagedQueries, scale: float = 1.0) -> None:
    """`close`, relative to the largest value of each request."""
    assert got.shape == want.shape
    for mine, expected in zip(got.split(queries.query_lens), want.split(queries.query_lens)):
        close(mine, expected, scale)


def paged_queries(lens: list[tuple[int, int]], page_size: int = 1, shuffle: bool = True) -> tuple[PagedQueries, int]:
    """Requests of (query_len, context_len) on shuffled pages and rows; also the number of slots of the pool."""
    pages = [-(-context // page_size) for _, context in lens]
    total = sum(pages) + 3
    order = torch.randperm(total) if shuffle else torch.arange(total)
    rows = torch.randperm(len(lens) + 2)[: len(lens)]
    table = torch.full((len(lens) + 2, max([c for _, c in lens], default=1) + 5), 2**30, dtype=torch.int32)
    for row, count, (_, context) in zip(rows, pages, lens):
        mine, order = order[:count], order[count:]
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[:context]
        table[row, :context] = slots.int()
    starts = torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).int()
    queries = PagedQueries(
        [q for q, _ in lens], [c for _, c in lens], rows.int(), starts, torch.tensor([c for _, c in lens]).int(), table,
        page_size,
    )  # fmt: skip
    return queries, total * page_size


def random_trees(queries: PagedQueries) -> tuple[PagedQueries, list[Tensor]]:
    """The same queries as draft trees, every token with a random parent before it; and their masks, [t, t] each."""
    trees, bits = [], []
    for count in queries.query_lens:
        seen = torch.eye(count, dtype=torch.bool)
        for token in range(1, count):
            parent = int(torch.randint(-1, token, ()))  # -1: a further root
            if parent >= 0:
                seen[token] |= seen[parent]
        trees.append(seen)
        bits += [sum(1 << b for b in row.nonzero().flatten().tolist()) for row in seen]
    signed = [b - (1 << 64) if b >= 1 << 63 else b for b in bits]
    return replace(queries, visible=torch.tensor(signed, dtype=torch.int64)), trees


def slots_of(queries: PagedQueries, request: int) -> Tensor:
    return queries.slot_table[int(queries.rows[request]), : queries.context_lens[request]].long()


def filled_cache(queries: PagedQueries, size: int, *width: int, dtype: torch.dtype) -> Tensor:
    """Random rows in the slots that belong to a request, NaN in all others."""
    cache = torch.full((size, *width), NAN, dtype=dtype)
    for request in range(queries.num_requests):
        slots = slots_of(queries, request)
        cache[slots] = normal(len(slots), *width, dtype=dtype)
    return cache


def only(queries: PagedQueries, request: int, query: slice | None = None) -> PagedQueries:
    """One request of a batch; with `query` only those query tokens, and the context up to them."""
    count, context = queries.query_lens[request], queries.context_lens[request]
    if query is not None:
        context = context - count + query.stop
        count = query.stop - query.start
    return PagedQueries(
        [count], [context], queries.rows[request : request + 1], torch.tensor([0, count]).int(),
        torch.tensor([context]).int(), queries.slot_table, queries.page_size,
    )  # fmt: skip
