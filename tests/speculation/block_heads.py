"""DFlash and DSpark heads written from their published layout: float64 references and their checkpoints.

The layers are transformers' Qwen3 or Llama modules. The reference has no KV cache: it computes every block from the
whole text.

Legend: T tokens, B tokens of a block, D hidden, F width of the target's states, V vocabulary, R rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.speculation.eagle_heads import Target, chain_counts, speculators_config


@dataclass
class BlockForm:
    """The structure of a head. markov: None (DFlash), or a kind of DSpark's Markov head. num_tokens: size of its draft
    vocabulary; 0: the target's. anchor: whether the first output of a block is a draft; None: of DSpark alone.
    speculators: written in the format of the speculators library."""

    size: int = 5
    markov: str | None = None
    rank: int = 24
    layer: str = "qwen3"
    num_layers: int = 2
    tapped: tuple[int, ...] = (0, 2)
    mask_id: int = 7
    confidence: bool = True
    num_tokens: int = 0
    anchor: bool | None = None
    speculators: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def skips_first(self) -> bool:
        return self.markov is None if self.anchor is None else not self.anchor

    def window(self, layer: int) -> int | None:
        kinds = self.fields.get("layer_types", ())
        return self.fields["sliding_window"] if "sliding_attention" in kinds[layer : layer + 1] else None

    @property
    def drafts(self) -> int:
        """Of a whole block."""
        return self.size - self.skips_first

    @property
    def algorithm(self) -> str:
        return "DSPARK" if self.markov else "DFLASH"


class ReferenceBlockHead(nn.Module):
    """A head for a target, with random weights, in float64."""

    def __init__(self, form: BlockForm, target: Target, seed: int) -> None:
        super().__init__()
        self.form, self._target = form, [target]
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        size, vocab = target.config.hidden_size, target.config.vocab_size
        self.config, layers, self._rotary, norm = _layers(form, target.config)
        self.layers = nn.ModuleList(layers)
        self.fc = nn.Linear(len(form.tapped) * size, size, bias=False)
        self.hidden_norm, self.norm = norm(size, self.config.rms_norm_eps), norm(size, self.config.rms_norm_eps)
        if form.num_tokens:
            self.lm_head = nn.Linear(size, form.num_tokens, bias=False)
        if form.markov is not None:
            self.markov_head = _Markov(form, size, vocab)
            if form.confidence:
                self.confidence_head = nn.ModuleDict({"proj": nn.Linear(size + form.rank, 1)})
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.data = 1 + 0.2 * torch.randn_like(parameter)
            elif parameter.dim() == 2:
                parameter.data = torch.randn_like(parameter) * parameter.shape[1] ** -0.5
            else:
                parameter.data = 0.3 * torch.randn_like(parameter)
        count = form.num_tokens
        self.ids = torch.randperm(vocab)[:count].sort().values if count else torch.arange(vocab)
        self.double()
        torch.random.set_rng_state(state)

    @property
    def target(self) -> Target:
        return self._target[0]

    def block(self, states: Tensor, ids: Tensor) -> Tensor:
        """states [T, F] of the text and ids [B] of the block after it -> outputs [B, D] before the final norm."""
        context = self.hidden_norm(self.fc(states))
        x = self.target.embedding(ids)
        rotary = self._rotary(x, torch.arange(len(context) + len(ids))[None])
        for i, layer in enumerate(self.layers):
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x), context, rotary, self.form.window(i))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x

    def _attend(
        self, attention: Any, x: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], window: int | None
    ) -> Tensor:
        """Attention of the block [B, D] to context [T, D] and itself, without a mask; with a window, of each token to
        the last `window` positions up to its own."""
        width = attention.head_dim
        cos, sin = (part[0] for part in rotary)

        def heads(projected: Tensor, norm: Any) -> Tensor:
            split = projected.unflatten(1, (-1, width))
            return norm(split) if norm is not None else split

        def turned(part: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            first, second = part.chunk(2, -1)
            return part * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

        both = torch.cat((context, x))
        q = turned(heads(attention.q_proj(x), getattr(attention, "q_norm", None)), cos[-len(x) :], sin[-len(x) :])
        k = turned(heads(attention.k_proj(both), getattr(attention, "k_norm", None)), cos, sin)
        v = heads(attention.v_proj(both), None)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        scores = torch.einsum("bhd,thd->hbt", q, k) * width**-0.5
        if window is not None:
            before = torch.arange(len(context), len(both))[:, None] - torch.arange(len(both))
            scores = scores.masked_fill((before < 0) | (before >= window), -torch.inf)
        weights = torch.softmax(scores, -1)
        return attention.o_proj(torch.einsum("hbt,thd->bhd", weights, v).flatten(1))

    def chain(self, states: Tensor, tokens: list[int], depth: int) -> list[int]:
        """Greedy drafts after `tokens`, of which all except the last have states [T, F]."""
        with torch.no_grad():
            logits, outputs = self.drafts(states, tokens[-1], depth)
            if self.form.markov is None:
                return self.ids[logits.argmax(-1)].tolist()
            before, found, state = tokens[-1], [], torch.zeros(self.form.rank, dtype=logits.dtype)
            for own, output in zip(logits, outputs):
                bias, state = self.markov_head(torch.tensor(before), output, state)
                before = int(self.ids[(own + bias).argmax()])
                found.append(before)
            return found

    def drafts(self, states: Tensor, root: int, depth: int) -> tuple[Tensor, Tensor]:
        """Logits [depth, W] of the drafts of a block, without a Markov head's bias, and outputs [depth, D]."""
        count = depth + self.form.skips_first
        outputs = self.norm(self.block(states, torch.tensor([root, *[self.form.mask_id] * (count - 1)])))
        outputs = outputs[count - depth :]
        return self.lm_head(outputs) if self.form.num_tokens else self.target.logits(outputs), outputs

    def distil(self, texts: list[list[int]], steps: int) -> None:
        """Trains the head to continue the target's texts within its vocabulary; deterministic."""
        depth = self.form.drafts
        numbers = torch.full((self.target.config.vocab_size,), -100)
        numbers[self.ids] = torch.arange(len(self.ids))
        data = [(text, self.target.states(text, self.form.tapped).float()) for text in texts]
        self.float()
        self.target.model.float()
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        for step in range(steps):
            text, states = data[step % len(data)]
            loss = torch.zeros(())
            for place in range(4 + step // len(data) % 7, len(text) - depth - 1, 7):
                logits, outputs = self.drafts(states[:place], text[place], depth)
                if self.form.markov is not None:
                    state = torch.zeros(self.form.rank)
                    for i in range(depth):
                        bias, state = self.markov_head(torch.tensor(text[place + i]), outputs[i], state)
                        logits = logits + bias * (torch.arange(depth) == i)[:, None]
                wanted = numbers[torch.tensor(text[place + 1 : place + 1 + depth])]
                if (wanted >= 0).any():
                    loss = loss + nn.functional.cross_entropy(logits, wanted, ignore_index=-100)
            if not loss.requires_grad:
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.target.model.double()
        self.double()

    def write(self, folder: Path, **fields: Any) -> Path:
        """A checkpoint in the layout of z-lab (DFlash), DeepSpec (DSpark) or the speculators library, in float32."""
        folder.mkdir(parents=True, exist_ok=True)
        form, tensors = self.form, {name: tensor.float() for name, tensor in self.state_dict().items()}
        own = {"block_size": form.size, "num_target_layers": self.target.config.num_hidden_layers}
        own["mask_token_id"], own["target_layer_ids"] = form.mask_id, list(form.tapped)
        config = self.config.to_dict() | {"torch_dtype": "float32"}
        if form.markov is None:
            section = {name: own.pop(name) for name in ("mask_token_id", "target_layer_ids")}
            config |= own | {"architectures": ["DFlashDraftModel"], "dflash_config": section}
        else:
            tensors["embed_tokens.weight"] = self.target.embedding.weight.detach().float().clone()
            if not form.num_tokens:
                tensors["lm_head.weight"] = torch.zeros(1)  # is not read
            config |= own | {"architectures": ["Qwen3DSparkModel"], "markov_rank": form.rank}
            config |= {"markov_head_type": form.markov, "enable_confidence_head": form.confidence}
        if form.speculators:
            config = self._speculators_config()
        if form.num_tokens:
            tensors["d2t"] = self.ids - torch.arange(len(self.ids))
            tensors["t2d"] = torch.zeros(self.target.config.vocab_size, dtype=torch.bool).index_fill_(0, self.ids, True)
        kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if "rotary" not in name}
        save_file(kept, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    def _speculators_config(self) -> dict[str, Any]:
        form, kind = self.form, "dspark" if self.form.markov else "dflash"
        config = speculators_config(kind, self.config, len(self.ids), form.drafts)
        config |= {"block_size": form.size, "mask_token_id": form.mask_id, "target_hidden_size": None}
        config["aux_hidden_state_layer_ids"] = [layer + 1 for layer in form.tapped]
        if form.anchor is not None:  # files of older versions lack it
            config["sample_from_anchor"] = form.anchor
        if form.markov is not None:
            config |= {"markov_rank": form.rank, "markov_head_type": form.markov}
            config |= {"enable_confidence_head": form.confidence, "confidence_head_with_markov": True}
        return config


class _Markov(nn.Module):
    """Token before, output [D] of the block, state [R] -> bias [W], next state."""

    def __init__(self, form: BlockForm, hidden: int, vocab: int) -> None:
        super().__init__()
        self.kind, rank = form.markov, form.rank
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, form.num_tokens or vocab, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, token: Tensor, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        latent = self.markov_w1(token)
        if self.kind == "gated":
            latent = latent * torch.sigmoid(self.gate_proj(torch.cat((output, latent))))
        elif self.kind == "rnn":
            gate, candidate, out = self.joint_proj(torch.cat((state, latent, output))).chunk(3)
            state = torch.sigmoid(gate) * state + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            latent = torch.tanh(out)
        return self.markov_w2(latent), state


def _layers(form: BlockForm, of: Any) -> tuple[Any, list[Any], Any, Any]:
    """Config, layers, rotary embedding and class of the norms."""
    import transformers
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    common = {
        "vocab_size": of.vocab_size, "hidden_size": of.hidden_size, "num_hidden_layers": form.num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "bos_token_id": of.bos_token_id,
        "eos_token_id": of.eos_token_id, "tie_word_embeddings": False,
    }  # fmt: skip
    if form.layer == "llama":
        config: Any = transformers.LlamaConfig(**common | form.fields)
        layers = [llama.LlamaDecoderLayer(config, i) for i in range(form.num_layers)]
        return config, layers, llama.LlamaRotaryEmbedding(config), llama.LlamaRMSNorm
    config = transformers.Qwen3Config(**common | form.fields)
    layers = [qwen3.Qwen3DecoderLayer(config, i) for i in range(form.num_layers)]
    return config, layers, qwen3.Qwen3RotaryEmbedding(config), qwen3.Qwen3RMSNorm


def block_counts(
    head: ReferenceBlockHead, prompt: list[int], answer: list[int], depth: int
) -> tuple[list[int], list[int]]:
    """`chain_counts` of the reference."""
    states = head.target.states(prompt + answer, head.form.tapped)
    return chain_counts(head.chain, states, prompt, answer, depth)
