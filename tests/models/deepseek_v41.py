"""DeepSeek V4.1: random checkpoints under the published names, and the model's formulas in float64.

No released transformers has the model. The formulas are those of `modeling_deepseek_v41.py` in transformers' repository
and of the technical report: attention by masks over all positions, without caches.

Legend: T tokens, D hidden, n streams, H heads, W channels of a key, I of an index key, R rotary width, S entries.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from moe_engine.kernels.ops.block_rounding import round_e2m1, round_e2m1_small, round_e4m3
from tests.models.byte_tokenizer import BOS, EOS, VOCAB_SIZE, write_tokenizer
from tests.models.checkpoints import write_tensors
from tests.models.v41_tower import IMAGE, put_tower

FIELDS: dict[str, Any] = {
    "model_type": "deepseek_v41_text", "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 9,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 40, "qk_rope_head_dim": 8, "q_lora_rank": 32,
    "o_groups": 2, "o_lora_rank": 16, "sliding_window": 16, "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 5], "index_source_layer_ids": [2, 4, 5, 7], "candidate_source_layer_id": 5,
    "candidate_topk_blocks": 6, "candidate_block_size": 4, "index_n_heads": 24, "index_head_dim": 16, "index_topk": 5,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rope_theta": 10000.0, "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 8, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
    },
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5, "hidden_act": "silu", "rms_norm_eps": 1e-20, "max_position_embeddings": 512,
    "engram_layer_ids": [1, 3], "engram_vocab_size": 90, "engram_max_ngram_size": 4, "engram_n_heads": 2,
    "engram_head_dim": 8, "engram_pad_token_id": 2, "engram_num_embeddings": [630, 834],
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False,
}  # fmt: skip
"""Of the language model. Widths of keys and index keys have no whole blocks: they are not rounded."""
STD = 0.15


def make_v41(
    path: Path, seed: int, dtype: torch.dtype = torch.float32, vision: dict[str, Any] | None = None, **fields: Any
) -> Path:
    """A checkpoint. vision: `vision_config` of its tower; None: it has none. fields: changes to `FIELDS`."""
    raw = FIELDS | fields
    path.mkdir(parents=True, exist_ok=True)
    write_tokenizer(path, raw["vocab_size"])
    raw |= {"engram_compressed_vocab_size": len(set(text_ids(path)))}
    tensors = random_tensors(raw, torch.Generator().manual_seed(seed), vision)
    write_tensors(path, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    outer = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "text_config": raw}
    outer |= {"bos_token_id": BOS, "eos_token_id": EOS, "dtype": str(dtype).removeprefix("torch.")}
    if vision is not None:
        outer |= {"vision_config": vision, "image_token_id": IMAGE}
    (path / "config.json").write_text(json.dumps(outer, indent=1))
    return path


def text_ids(path: Path) -> list[int]:
    """The number of each token's text, in the order of the first tokens with these texts."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    numbers = dict[str, int]()
    return [numbers.setdefault(_text(tokenizer, id), len(numbers)) for id in range(tokenizer.get_vocab_size())]


def _text(tokenizer: Any, id: int) -> str:
    """A token's text without accents and case."""
    text = tokenizer.decode([id], skip_special_tokens=False)
    if "\ufffd" in text:
        return str(tokenizer.id_to_token(id))
    plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    plain = "".join(c for c in plain if unicodedata.category(c) != "Mn").lower()
    plain = re.sub(r"[ \t\r\n]+", " ", plain)
    return (plain if plain == " " else plain.strip()) or text


def random_tensors(
    f: dict[str, Any], generator: torch.Generator, vision: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    hidden, width, rank = f["hidden_size"], f["head_dim"], f["q_lora_rank"]

    def put(name: str, *shape: int, scale: float = STD, shift: float = 0.0) -> None:
        found[name] = shift + scale * torch.randn(*shape, generator=generator)

    def norm(name: str, size: int) -> None:
        put(f"{name}.weight", size, scale=0.2, shift=1.0)

    def attention(name: str, i: int) -> None:
        put(f"{name}.wq_a.weight", rank, hidden)
        put(f"{name}.wq_b.weight", f["num_attention_heads"] * width, rank, scale=0.3)
        put(f"{name}.wkv.weight", width, hidden)
        norm(f"{name}.q_norm", rank)
        norm(f"{name}.kv_norm", width)
        groups, out = f["o_groups"], f["o_lora_rank"]
        put(f"{name}.wo_a.weight", groups * out, f["num_attention_heads"] * width // groups)
        put(f"{name}.wo_b.weight", hidden, groups * out, scale=0.3)
        put(f"{name}.attn_sink", f["num_attention_heads"], scale=1.0)
        if i in f["kv_source_layer_ids"]:
            for part in ("wkv", "wgate")[: f["compress_ratios"][i]]:
                put(f"{name}.compressor.{part}.weight", width, hidden)
            norm(f"{name}.compressor.norm", width)
            put(f"{name}.indexer.wk.weight", f["index_head_dim"], width)
            norm(f"{name}.indexer.k_norm", f["index_head_dim"])
        if i in f["index_source_layer_ids"]:
            put(f"{name}.indexer.wq_b.weight", f["index_n_heads"] * f["index_head_dim"], rank)
            put(f"{name}.indexer.weights_proj.weight", f["index_n_heads"], hidden)

    def experts(name: str, number: int) -> None:
        put(f"{name}.gate.weight", number, hidden)
        put(f"{name}.gate.bias", number, scale=0.1)
        put(f"{name}.gate.bias_vl", number)
        for expert in [f"experts.{i}" for i in range(number)] + ["shared_experts"]:
            put(f"{name}.{expert}.w1.weight", f["moe_intermediate_size"], hidden)
            put(f"{name}.{expert}.w3.weight", f["moe_intermediate_size"], hidden)
            put(f"{name}.{expert}.w2.weight", hidden, f["moe_intermediate_size"])

    def layer(name: str, i: int, number: int) -> None:
        norm(f"{name}.attn_norm", hidden)
        norm(f"{name}.ffn_norm", hidden)
        attention(f"{name}.attn", i)
        experts(f"{name}.ffn", number)
        count = f["hc_mult"] * (2 + f["hc_mult"])
        for part in ("attn", "ffn"):
            put(f"{name}.hc_{part}_fn", count, f["hc_mult"] * hidden)
            put(f"{name}.hc_{part}_base", count, scale=1.0)
            put(f"{name}.hc_{part}_scale", 3, scale=0.3, shift=1.0)

    put("embed.weight", f["vocab_size"], hidden)
    put("head.weight", f["vocab_size"], hidden)
    norm("norm", hidden)
    for i in range(f["num_hidden_layers"]):
        layer(f"layers.{i}", i, f["n_routed_experts"])
        if i in f["engram_layer_ids"]:
            engram, each = f"layers.{i}.engram", f["engram_head_dim"]
            rows = f["engram_num_embeddings"][f["engram_layer_ids"].index(i)]
            put(f"{engram}.embed.weight", rows, each, scale=1)
            columns = (f["engram_max_ngram_size"] - 1) * f["engram_n_heads"]
            put(f"{engram}.wkv.weight", hidden * (f["hc_mult"] + 1), columns * each)
            for part in "qk":
                put(f"{engram}.{part}_weight", f["hc_mult"], hidden, scale=0.5, shift=1.0)
    for stage in range(f["num_nextn_predict_layers"]):
        layer(f"mtp.{stage}", -1, f["dspark_n_routed_experts"])
    if f["num_nextn_predict_layers"]:
        put("mtp.0.main_proj.weight", hidden, len(f["dspark_target_layer_ids"]) * hidden)
        norm("mtp.0.main_norm", hidden)
        last, own = f"mtp.{f['num_nextn_predict_layers'] - 1}", f["dspark_markov_rank"]
        norm(f"{last}.norm", hidden)
        put(f"{last}.markov_head.embed.weight", f["vocab_size"], own, scale=1.0)
        put(f"{last}.markov_head.head.weight", f["vocab_size"], own, scale=1.0)
        put(f"{last}.confidence_head.proj.weight", 1, hidden + own)
    if vision is not None:
        put_tower(vision, hidden, put)
        found["head.weight"][IMAGE] = 0.0  # no answer has the placeholder, which the formulas take for an image
    return found


class V41Reference:
    """The logits of a checkpoint, in float64."""

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        self.fields: dict[str, Any] = config["text_config"]
        self._image = IMAGE if "vision_config" in config else -1  # without a tower the id is one of the text's
        self._t = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
        self.embeddings = self._t["embed.weight"]
        self._texts = text_ids(path)
        self.margin = math.inf
        """The least relative difference of scores that decided a choice."""

    def logits(self, ids: list[int], images: Tensor | None = None) -> Tensor:
        """[T, V]. images: rows of the tower for the image tokens."""
        return self._head("norm", *self._run(ids, images)[:2])

    def states(self, ids: list[int], images: Tensor | None = None) -> Tensor:
        """[T, K D]: means of the streams before the layers that DSpark layers read."""
        return torch.cat(self._run(ids, images)[2], 1)

    def _run(self, ids: list[int], images: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The streams [T, n, D] after the last layer, the weights [T, n] of their sum, and the means of `states`."""
        f, tapped = self.fields, list[Tensor]()
        streams, before = self._start(ids)
        if images is not None:
            streams[self._is_image] = images.unsqueeze(1)
        shared: dict[str, Tensor] = {}
        for i in range(f["num_hidden_layers"]):
            if i in f["engram_layer_ids"]:
                streams = self._with_rows(streams, ids, i)
            if i in f.get("dspark_target_layer_ids", ()):
                tapped.append(streams.mean(1))
            streams, before = self._layer(streams, before, f"layers.{i}", partial(self._attention, i=i, shared=shared))
        return streams, before, tapped

    def _start(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        n = self.fields["hc_mult"]
        self._is_image = torch.tensor(ids) == self._image
        streams = self._t["embed.weight"][torch.tensor(ids)].unsqueeze(1).repeat(1, n, 1)  # [T, n, D]
        before = torch.zeros(len(ids), n, dtype=torch.float64)
        before[:, 0] = 1.0
        return streams, before

    def _layer(self, streams: Tensor, before: Tensor, name: str, attention: Any) -> tuple[Tensor, Tensor]:
        for part, run in (("attn", attention), ("ffn", partial(self._experts, name=f"{name}.ffn"))):
            read, write, mix = self._mixes(streams, f"{name}.hc_{part}")
            x = self._norm(f"{name}.{part}_norm", torch.einsum("tn,tnd->td", before, streams))
            streams = torch.einsum("tij,tid->tjd", mix, streams) + write.unsqueeze(2) * run(x)[:, None]
            before = read
        return streams, before

    def _head(self, norm: str, streams: Tensor, before: Tensor) -> Tensor:
        return self._norm(norm, torch.einsum("tn,tnd->td", before, streams)) @ self._t["head.weight"].T

    def _with_rows(self, streams: Tensor, ids: list[int], i: int) -> Tensor:
        """The streams with the rows of the tokens' n-grams."""
        f, name, n = self.fields, f"layers.{i}.engram", streams.shape[1]
        sizes, longest = self._primes(i), f["engram_max_ngram_size"]
        bound = (2**63 - 1) // f["engram_compressed_vocab_size"] // 2
        drawn = np.random.default_rng(10007 * i).integers(0, bound, longest, dtype=np.int64)
        empty = self._texts[f["engram_pad_token_id"]]
        rows = []
        for t in range(len(ids)):
            begin = 1 + max((i for i in range(t + 1) if ids[i] == self._image), default=-1)  # after the last image
            texts = [empty] * (longest - 1 + begin) + [self._texts[id] for id in ids[begin:]]
            mixed, own = texts[t + longest - 1] * (2 * int(drawn[0]) + 1), []
            for back in range(1, longest):
                mixed ^= texts[t + longest - 1 - back] * (2 * int(drawn[back]) + 1)
                own += [mixed % size for size in sizes[len(own) : len(own) + f["engram_n_heads"]]]
            rows.append([sum(sizes[:column]) + row for column, row in enumerate(own)])
        found = self._t[f"{name}.embed.weight"][torch.tensor(rows)].flatten(1) @ self._t[f"{name}.wkv.weight"].T
        key, value = found.view(len(ids), n + 1, -1).split((n, 1), 1)
        unit = lambda x: x * (x.square().mean(-1, keepdim=True) + f["rms_norm_eps"]).rsqrt()  # noqa: E731
        weights = self._t[f"{name}.q_weight"] * self._t[f"{name}.k_weight"]
        dot = (unit(streams) * unit(key) * weights).sum(2, keepdim=True) * f["hidden_size"] ** -0.5
        gate = (dot.sign() * dot.abs().clamp(min=1e-6).sqrt()).sigmoid()
        return streams + gate.masked_fill(self._is_image.view(-1, 1, 1), 0.0) * value

    def _primes(self, i: int) -> list[int]:
        """Rows of each column of a layer's table."""
        f, used = self.fields, list[int]()
        for layer in f["engram_layer_ids"]:
            first = len(used)
            for _ in range(f["engram_max_ngram_size"] - 1):
                number = f["engram_vocab_size"] - 1
                for _ in range(f["engram_n_heads"]):
                    number += 1
                    while number in used or any(number % d == 0 for d in range(2, number)):
                        number += 1
                    used.append(number)
            if layer == i:
                return used[first:]
        raise AssertionError(i)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.fields["rms_norm_eps"]).rsqrt() * self._t[f"{name}.weight"]

    def _mixes(self, streams: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        f, n = self.fields, streams.shape[1]
        flat = streams.flatten(1)
        flat = flat * (flat.square().mean(1, keepdim=True) + f["rms_norm_eps"]).rsqrt()
        scale = self._t[f"{name}_scale"].repeat_interleave(torch.tensor([n, n, n * n]))
        numbers = flat @ self._t[f"{name}_fn"].T * scale + self._t[f"{name}_base"]
        mix = numbers[:, 2 * n :].view(-1, n, n).softmax(2) + f["hc_eps"]
        for step in range(f["hc_sinkhorn_iters"]):
            if step:
                mix = mix / (mix.sum(2, keepdim=True) + f["hc_eps"])
            mix = mix / (mix.sum(1, keepdim=True) + f["hc_eps"])
        return numbers[:, :n].sigmoid() + f["hc_eps"], 2 * numbers[:, n : 2 * n].sigmoid(), mix

    def _attention(self, x: Tensor, i: int, shared: dict[str, Tensor]) -> Tensor:
        f, name, rate = self.fields, f"layers.{i}.attn", self.fields["compress_ratios"][i]
        at = torch.arange(len(x))
        latent, q = self._query(x, name, at, rate)
        keys = self._keys(x, name, at, rate)
        seen = (at[None] <= at[:, None]) & (at[None] > at[:, None] - f["sliding_window"])  # [T, T]
        if rate:
            if i in f["kv_source_layer_ids"]:
                self._write(x, name, rate, shared)
            if i in f["index_source_layer_ids"]:
                shared["chosen"] = self._chosen(x, latent, i, rate, shared)
            keys, seen = torch.cat((keys, shared["entries"])), torch.cat((seen, shared["chosen"]), 1)
        return self._attend(q, keys, seen, name, at, rate)

    def _query(self, x: Tensor, name: str, at: Tensor, rate: int) -> tuple[Tensor, Tensor]:
        """The latent, and the query [T, H, W] of tokens at positions `at`."""
        latent = self._norm(f"{name}.q_norm", x @ self._t[f"{name}.wq_a.weight"].T)
        q = (latent @ self._t[f"{name}.wq_b.weight"].T).unflatten(1, (self.fields["num_attention_heads"], -1))
        return latent, self._rotated(q, at, rate)

    def _keys(self, x: Tensor, name: str, at: Tensor, rate: int) -> Tensor:
        keys = self._rotated(self._norm(f"{name}.kv_norm", x @ self._t[f"{name}.wkv.weight"].T), at, rate)
        return _rounded(round_e4m3, keys)

    def _attend(self, q: Tensor, keys: Tensor, seen: Tensor, name: str, at: Tensor, rate: int) -> Tensor:
        """The layer's result; seen [T, S]: the keys of each token."""
        f, (tokens, heads, width) = self.fields, q.shape
        scores = torch.einsum("thw,sw->hts", q, keys) * width**-0.5
        scores = scores.masked_fill(~seen, -math.inf)
        sinks = self._t[f"{name}.attn_sink"].view(heads, 1, 1).expand(heads, tokens, 1)
        probabilities = torch.cat((scores, sinks), 2).softmax(2)[:, :, :-1]
        mixed = self._rotated(torch.einsum("hts,sw->thw", probabilities, keys), at, rate, -1)
        groups = mixed.reshape(tokens, f["o_groups"], -1)
        weight = self._t[f"{name}.wo_a.weight"].view(f["o_groups"], f["o_lora_rank"], -1)
        return torch.einsum("tgc,goc->tgo", groups, weight).flatten(1) @ self._t[f"{name}.wo_b.weight"].T

    def _write(self, x: Tensor, name: str, rate: int, shared: dict[str, Tensor]) -> None:
        count, width = len(x) // rate, self.fields["head_dim"]
        values = (x @ self._t[f"{name}.compressor.wkv.weight"].T)[: count * rate].view(count, rate, width)
        if rate > 1:
            gates = (x @ self._t[f"{name}.compressor.wgate.weight"].T)[: count * rate].view(count, rate, width)
            values = values * gates.softmax(1)
        latent, at = self._norm(f"{name}.compressor.norm", values.sum(1)), torch.arange(count) * rate
        key = self._norm(f"{name}.indexer.k_norm", latent @ self._t[f"{name}.indexer.wk.weight"].T)
        shared["keys"] = _rounded(round_e2m1, self._rotated(key, at, rate))
        shared["entries"] = _rounded(round_e2m1_small, self._rotated(latent, at, rate))

    def _chosen(self, x: Tensor, latent: Tensor, i: int, rate: int, shared: dict[str, Tensor]) -> Tensor:
        """Which entries [T, S] each token selects."""
        f, name = self.fields, f"layers.{i}.attn.indexer"
        heads, width, tokens = f["index_n_heads"], f["index_head_dim"], len(x)
        q = self._rotated(
            (latent @ self._t[f"{name}.wq_b.weight"].T).view(tokens, heads, width), torch.arange(tokens), rate
        )
        products = torch.einsum("thi,si->ths", _rounded(round_e2m1, q), shared["keys"]).relu()
        gates = x @ self._t[f"{name}.weights_proj.weight"].T
        scores = torch.einsum("ths,th->ts", products, gates) * (heads * width) ** -0.5
        count = (torch.arange(tokens) + 1) // rate  # entries that each token sees
        places = torch.arange(scores.shape[1])
        scores = scores.masked_fill(places >= count[:, None], -math.inf)
        if i == f["candidate_source_layer_id"]:
            shared["candidates"] = self._candidates(scores, count)
        elif 0 <= f["candidate_source_layer_id"] < i:
            scores = scores.masked_fill(~shared["candidates"], -math.inf)
        return self._best(scores, f["index_topk"])

    def _candidates(self, scores: Tensor, count: Tensor) -> Tensor:
        size = self.fields["candidate_block_size"]
        blocks = pad(scores, (0, -scores.shape[1] % size), value=-math.inf).unflatten(1, (-1, size)).amax(2)
        newest = torch.arange(blocks.shape[1]) == (count[:, None] - 1).div(size, rounding_mode="floor")
        chosen = self._best(blocks.masked_fill(newest, math.inf), self.fields["candidate_topk_blocks"])
        return chosen.repeat_interleave(size, 1)[:, : scores.shape[1]]

    def _best(self, scores: Tensor, count: int) -> Tensor:
        """Which of scores [T, S] are the `count` best of their row, without those that are -inf."""
        order = scores.sort(dim=1, descending=True, stable=True)
        if scores.shape[1] > count:
            last, next_ = order.values[:, count - 1], order.values[:, count]
            decided = torch.isfinite(last) & torch.isfinite(next_)
            gaps = (last - next_)[decided] / last[decided].abs().clamp(min=1e-12)
            self.margin = min(self.margin, float(gaps.min()) if len(gaps) else math.inf)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order.indices[:, :count], True)
        return chosen & (scores > -math.inf)

    def _experts(self, x: Tensor, name: str) -> Tensor:
        f, draft = self.fields, name.startswith("mtp.")
        scores = softplus(x @ self._t[f"{name}.gate.weight"].T).sqrt()
        top_k = f["dspark_num_experts_per_tok" if draft else "num_experts_per_tok"]
        biases = self._t[f"{name}.gate.bias"], self._t[f"{name}.gate.bias_vl"]
        bias = torch.where(self._is_image[:, None], biases[1], biases[0])
        weights = scores * self._best(scores + bias, top_k)
        weights = weights / weights.sum(1, keepdim=True) * f["routed_scaling_factor"]
        out = self._mlp(x, f"{name}.shared_experts")
        for expert in range(scores.shape[1]):
            out = out + weights[:, expert, None] * self._mlp(x, f"{name}.experts.{expert}")
        return out

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        limit = self.fields["swiglu_limit"]
        gate = (x @ self._t[f"{name}.w1.weight"].T).clamp(max=limit)
        up = (x @ self._t[f"{name}.w3.weight"].T).clamp(-limit, limit)
        return (silu(gate) * up) @ self._t[f"{name}.w2.weight"].T

    def _rotated(self, x: Tensor, positions: Tensor, rate: int, sign: int = 1) -> Tensor:
        """x [T, W] or [T, H, W], its last R channels rotated in pairs."""
        angles = positions.double()[:, None] * self._frequencies(rate)
        pairs = torch.polar(torch.ones_like(angles), sign * angles)
        width = 2 * angles.shape[1]
        turned = torch.view_as_complex(x[..., -width:].unflatten(-1, (-1, 2)).contiguous())
        turned = turned * (pairs if x.dim() == 2 else pairs[:, None])
        return torch.cat((x[..., :-width], torch.view_as_real(turned).flatten(-2)), -1)

    def _frequencies(self, rate: int) -> Tensor:
        """[R / 2]; of layers with entries by YaRN, which changes no amplitude."""
        f, width = self.fields, self.fields["qk_rope_head_dim"]
        theta = f["compress_rope_theta"] if rate else f["rope_theta"]
        plain = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        if not rate or not f["rope_scaling"]:
            return plain
        y = f["rope_scaling"]
        original = y["original_max_position_embeddings"]

        def place(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(place(y["beta_fast"])), 0)
        high = min(math.ceil(place(y["beta_slow"])), width - 1)
        ramp = ((torch.arange(width // 2) - low) / max(high - low, 1e-3)).clamp(0, 1).double()
        return plain / y["factor"] * ramp + plain * (1 - ramp)


def _rounded(round_: Any, x: Tensor) -> Tensor:
    """By the engine's rounding, which `test_block_rounding.py` compares with tables."""
    wide = x.float()
    found: Tensor = round_(wide)
    return x if found is wide else found.double()
