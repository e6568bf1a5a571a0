"""EAGLE heads written from the published layout: float64 references, their checkpoints, and offline acceptance.

The decoder layer is transformers'; the reference has no KV cache and computes every chain from the whole text.

Legend: T tokens, D hidden, F width of the target's states, W draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

LAYERS = 5
TAPS = (0, 2, 3)
"""Layers whose outputs EAGLE-3 reads."""
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")


class Target:
    """transformers' model of a checkpoint, in float64."""

    def __init__(self, path: Path) -> None:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, experts_implementation="eager"
        )
        self.model = loaded.eval()
        self.config = loaded.config.get_text_config()
        self._text = getattr(loaded.model, "language_model", loaded.model)
        self.embedding = loaded.get_input_embeddings()

    @torch.no_grad()
    def states(self, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
        """[T, F]: the concatenated outputs of the layers `taps`; without taps, the last state after the norm."""
        outputs = []
        last = self._text.layers[-1]  # hidden_states has its output after the final norm
        hook = last.register_forward_hook(lambda *call: outputs.append(_first(call[-1])))
        found = self._text(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        if not taps:
            return found.last_hidden_state[0]
        states = [*found.hidden_states[:-1], *outputs]
        return torch.cat([states[layer + 1][0] for layer in taps], dim=-1)

    def logits(self, states: Tensor) -> Tensor:
        return self.model.lm_head(states)

    def continued(self, prompt: list[int], count: int) -> list[int]:
        """A prompt with its greedy answer of `count` tokens."""
        ids = torch.tensor([prompt])
        return self.model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None)[0].tolist()


@dataclass
class Form:
    """The structure of a head.

    layer: ``llama``, ``qwen2``, ``qwen3`` or ``deepseek``. num_tokens: size of an EAGLE-3 draft vocabulary; 0: the
    target's. token_map: ids that an EAGLE-2 head drafts. tapped: layers whose outputs EAGLE-3 reads; -1: the
    embedding. speculators: written in the format of the speculators library. fields: further fields of the layer's
    config.
    """

    eagle3: bool = True
    layer: str = "llama"
    num_tokens: int = 0
    token_map: tuple[int, ...] = ()
    bias: bool = False
    norms_residual: bool = False
    norms_states: bool = False
    norms_joined: bool = False
    norms_output: bool = False
    own_head: bool = True
    num_layers: int = 1
    tapped: tuple[int, ...] = TAPS
    speculators: bool = False
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def algorithm(self) -> str:
        return "EAGLE3" if self.eagle3 else "EAGLE"

    @property
    def taps(self) -> tuple[int, ...]:
        return self.tapped if self.eagle3 else ()


class ReferenceHead(nn.Module):
    """A head for a target, with random weights, in float64."""

    def __init__(self, form: Form, target: Target, seed: int) -> None:
        super().__init__()
        self.form, self._target = form, [target]
        state = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self._build(target.config)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                parameter.data = 1 + 0.2 * torch.randn_like(parameter)
            elif parameter.dim() == 2:
                parameter.data = torch.randn_like(parameter) * parameter.shape[1] ** -0.5
            else:
                parameter.data = 0.3 * torch.randn_like(parameter)
        vocab, count = target.config.vocab_size, form.num_tokens
        ids = torch.randperm(vocab)[:count].sort().values if count else torch.arange(vocab)
        self.ids = torch.tensor(form.token_map) if form.token_map else ids
        self.double()
        torch.random.set_rng_state(state)

    def _build(self, of: Any) -> None:
        form, size = self.form, of.hidden_size
        self.config = config = _layer_config(form, of)
        self.layer, self._rotary = _layer(form.layer, config)
        self.further = nn.ModuleList(_layer(form.layer, config)[0] for _ in range(form.num_layers - 1))
        width = len(form.taps) * size if form.eagle3 else 2 * size
        self.fc = nn.Linear(width, size, bias=form.bias)
        if not form.eagle3:
            self.layer.input_layernorm = nn.Identity()
            return
        attention = self.layer.self_attn
        for name in _PROJECTIONS:
            if getattr(attention, name, None) is not None:
                setattr(attention, name, _widened(getattr(attention, name), 2 * size))
        norm = type(self.layer.post_attention_layernorm)
        self.hidden_norm, self.norm = norm(size, config.rms_norm_eps), norm(size, config.rms_norm_eps)
        if form.own_head:
            self.lm_head = nn.Linear(size, form.num_tokens or of.vocab_size, bias=False)
        if form.norms_joined:
            self.input_norm = norm(len(form.taps) * size, config.rms_norm_eps)
        if form.norms_states:
            self.fc_norm = nn.ModuleList(norm(size, config.rms_norm_eps) for _ in form.taps)

    @property
    def target(self) -> Target:
        return self._target[0]

    def prepare(self, states: Tensor) -> Tensor:
        """[T, F] -> [T, D], hidden states of the first draft step."""
        if not self.form.eagle3:
            return states
        if self.form.norms_joined:
            states = self.input_norm(states)
        if self.form.norms_states:
            parts = states.chunk(len(self.form.taps), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        return self.fc(states)

    def forward(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The next token of each position [T] and hidden states [T, D] from the start of a text -> v [T, D]."""
        return self.over(self.target.embedding(ids), hidden, self.rotary(torch.arange(len(ids))))

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, T, Dh] of positions [T]."""
        return self._rotary(self.fc.weight, positions[None])

    def over(self, embedding: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """`forward` with the embeddings [T, D] of the next tokens."""
        embedding, hidden = embedding[None], hidden[None]
        if not self.form.eagle3:
            v = self.fc(torch.cat((embedding, hidden), -1))
            for layer in (self.layer, *self.further):
                v = _first(layer(v, position_embeddings=rotary))
            return v[0]
        normed = self.hidden_norm(hidden)
        stream = normed if self.form.norms_residual else hidden
        x = torch.cat((self.layer.input_layernorm(embedding), normed), -1)
        mixed = self.layer.self_attn(hidden_states=x, position_embeddings=rotary, attention_mask=None)[0]
        stream = stream + mixed
        v = stream + self.layer.mlp(self.layer.post_attention_layernorm(stream))
        for layer in self.further:
            v = _first(layer(v, position_embeddings=rotary))
        return self.norm(v[0]) if self.form.norms_output else v[0]

    def logits(self, v: Tensor) -> Tensor:
        """[T, D] -> [T, W]."""
        if not self.form.eagle3:
            return self.target.logits(v)[:, self.ids]
        if not self.form.norms_output:
            v = self.norm(v)
        return self.lm_head(v) if self.form.own_head else self.target.logits(v)

    @torch.no_grad()
    def chain(self, states: Tensor, tokens: list[int], depth: int) -> list[int]:
        """Greedy drafts after `tokens`, of which all except the last have states [T, F]."""
        hidden, ids, drafts = self.prepare(states), list(tokens[1:]), []
        for _ in range(depth):
            v = self.forward(torch.tensor(ids), hidden)
            drafts.append(int(self.ids[self.logits(v[-1:])[0].argmax()]))
            ids.append(drafts[-1])
            hidden = torch.cat((hidden, v[-1:]))
        return drafts

    def distil(self, texts: list[list[int]], steps: int) -> None:
        """Trains the head to predict the target's text within its vocabulary; deterministic."""
        place = torch.full((self.target.config.vocab_size,), -100)
        place[self.ids] = torch.arange(len(self.ids))
        self.float()
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        data = [(torch.tensor(t), self.target.states(t, self.form.taps).float()) for t in texts]
        self.target.model.float()
        for step in range(steps):
            tokens, states = data[step % len(data)]
            v = self.forward(tokens[1:-1], self.prepare(states[:-2]))
            loss = nn.functional.cross_entropy(self.logits(v), place[tokens[2:]], ignore_index=-100)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        self.target.model.double()
        self.double()

    def write(self, folder: Path, **fields: Any) -> Path:
        """A checkpoint in the layout of the authors (EAGLE-2) or SGLang (EAGLE-3), in float32."""
        folder.mkdir(parents=True, exist_ok=True)
        form, size = self.form, self.target.config.vocab_size
        prefix = "midlayer" if form.eagle3 and not form.speculators else "layers.0"
        tensors = {}
        for name, tensor in self.state_dict().items():
            if "rotary" not in name:
                tensors[_published(name, prefix)] = tensor.float()
        if form.eagle3:
            tensors[f"{prefix}.hidden_norm.weight"] = tensors.pop("hidden_norm.weight")
            if form.num_tokens:
                tensors["d2t"] = self.ids - torch.arange(len(self.ids))
                tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, self.ids, True)
        else:
            tensors["embed_tokens.weight"] = self.target.embedding.weight.detach().float().clone()
        save_file(
            {name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
        )
        config = self.config.to_dict() | {"architectures": [_architecture(form)], "torch_dtype": "float32"}
        config |= {"num_hidden_layers": form.num_layers}
        if form.eagle3:
            config |= {"draft_vocab_size": form.num_tokens or size, "norm_before_residual": form.norms_residual}
            config |= {"fc_norm": form.norms_states, "norm_output": form.norms_output}
            config |= {"norm_before_fc": form.norms_joined}
            field = "eagle_aux_hidden_state_layer_ids"
            if -1 in form.taps:  # which only vLLM's field names
                config[field] = [layer + 1 for layer in form.taps]
            else:
                config["eagle_config"] = {field: list(form.taps), "use_aux_hidden_state": True}
        if form.speculators:
            config = speculators_config("eagle3", self.config, form.num_tokens or size) | {
                "norm_before_residual": form.norms_residual, "norm_before_fc": form.norms_joined,
                "fc_norm": form.norms_states, "norm_output": form.norms_output, "target_hidden_size": None,
                "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in form.taps],
            }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder


def speculators_config(kind: str, layer: Any, num_tokens: int, drafts: int = 3) -> dict[str, Any]:
    """Fields that the speculators library writes for every kind of head. layer: config of the decoder layers."""
    name = {"eagle3": "Eagle3Speculator", "dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[kind]
    verifier = {"architectures": [], "name_or_path": "somewhere/else"}
    method = {"proposal_type": "greedy", "speculative_tokens": drafts, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    own = {"algorithm": kind, "default_proposal_method": "greedy", "proposal_methods": [method], "verifier": verifier}
    return {
        "architectures": [name], "speculators_model_type": kind, "speculators_version": "0.5.0", "dtype": "float32",
        "draft_vocab_size": num_tokens, "speculators_config": own, "transformer_layer_config": layer.to_diff_dict(),
    }  # fmt: skip


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def _published(name: str, prefix: str) -> str:
    if name.startswith("further."):  # as vLLM reads them
        number, _, rest = name.removeprefix("further.").partition(".")
        return f"layers.{int(number) + 1}.{rest}"
    return name.replace("layer.", f"{prefix}.", 1) if name.startswith("layer.") else name


def _widened(projection: nn.Linear, width: int) -> nn.Linear:
    return nn.Linear(width, projection.out_features, bias=projection.bias is not None)


def _architecture(form: Form) -> str:
    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "deepseek": "DeepseekV3"}[form.layer]
    if form.eagle3:
        return "Eagle3DeepseekV2ForCausalLM" if form.layer == "deepseek" else f"{family}ForCausalLMEagle3"
    return f"{family}ForCausalLM" + ("" if form.layer == "llama" else "Eagle")


def _layer_config(form: Form, of: Any) -> Any:
    import transformers

    common = {
        "vocab_size": of.vocab_size, "hidden_size": of.hidden_size, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
        "bos_token_id": of.bos_token_id, "eos_token_id": of.eos_token_id, "tie_word_embeddings": False,
    }  # fmt: skip
    if form.layer != "deepseek":
        config = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}[form.layer]
        return getattr(transformers, config)(**common | form.fields)
    mla = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 24}
    mla |= {"num_key_value_heads": 4, "first_k_dense_replace": 1}
    return transformers.DeepseekV3Config(**common | mla | form.fields)


def _layer(kind: str, config: Any) -> tuple[Any, Any]:
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.qwen2 import modeling_qwen2 as qwen2
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    config._attn_implementation = "sdpa"
    if kind == "llama":
        return llama.LlamaDecoderLayer(config, 0), llama.LlamaRotaryEmbedding(config)
    if kind == "qwen2":
        return qwen2.Qwen2DecoderLayer(config, 0), qwen2.Qwen2RotaryEmbedding(config)
    if kind == "qwen3":
        return qwen3.Qwen3DecoderLayer(config, 0), qwen3.Qwen3RotaryEmbedding(config)
    return deepseek.DeepseekV3DecoderLayer(config, 0), deepseek.DeepseekV3RotaryEmbedding(config)


def offline_counts(
    head: ReferenceHead, prompt: list[int], answer: list[int], depth: int
) -> tuple[list[int], list[int]]:
    """`chain_counts` of the reference."""
    states = head.target.states(prompt + answer, head.form.taps)
    return chain_counts(head.chain, states, prompt, answer, depth)


def chain_counts(
    chain: Callable[[Tensor, list[int], int], list[int]], states: Tensor, prompt: list[int], answer: list[int],
    depth: int,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Proposed and accepted drafts of a request at each depth, by whole chains.

    The first token of the answer comes from the prompt's step; drafts beyond the end are not counted.

    Args:
        chain: drafts after a text, from the hidden states of all its tokens but the last.
        states: [T, F], of prompt and answer.
    """
    text = prompt + answer
    proposed, accepted = [0] * depth, [0] * depth
    known = len(prompt) + 1
    while known < len(text):
        left = len(text) - known
        if left > 1:
            drafts = chain(states[: known - 1], text[:known], depth)
            good = 0
            while good < min(depth, left) and drafts[good] == text[known + good]:
                good += 1
            for i in range(min(depth, left) if good + 1 >= left else depth):
                proposed[i] += 1
            for i in range(good):
                accepted[i] += 1
            known += min(good + 1, left)
        else:
            known += 1
    return proposed, accepted
