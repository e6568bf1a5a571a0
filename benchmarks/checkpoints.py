"""Random checkpoints of a chosen shape, for benchmarks: ``python -m benchmarks.checkpoints [SHAPE] [--directory D]``.

Writes (once; later calls reuse it) config.json, a byte-level tokenizer and bf16 safetensors with the hub's tensor
names, one expert per tensor, one shard per layer, so that only one layer is in memory at a time. The default
``moe-390m`` has the V3 architecture (90 M of its 390 M parameters are active per token); ``dense-101m`` is Llama's;
``moe-tiny`` and ``dense-tiny`` are for smoke tests. Any field of config.json can be changed: ``--set
num_hidden_layers=3``. With ``--set num_nextn_predict_layers=1`` a V3 shape gets an MTP layer, whose drafts nearly never
agree with the model (`agreeing_checkpoint` writes one with agreeing drafts).

The weights are random with realistic statistics: every linear keeps the scale of its input, norm weights differ from 1
and the router's bias from 0, the logits are spread enough that greedy decoding does not loop, and experts are chosen
nearly evenly, so that a step reads as many of them as the formulas of `step_work` assume.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import report
from moe_engine.kernels.cpu.library import cache_folder
from moe_engine.tokenizer.byte_alphabet import byte_alphabet

LOGIT_SPREAD = 3.0
"""Standard deviation of the logits: the best token is clear, and depends on the context."""
MakeShards = Callable[[dict[str, Any], int], Iterable[dict[str, Tensor]]]
if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<｜User｜>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}<｜Assistant｜>{{ message['content'] }}<｜end▁of▁sentence｜>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": 16384,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_DEEPSEEK_V3: dict[str, Any] = {
    **_COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 1024,
    "num_hidden_layers": 7,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "intermediate_size": 2048,
    "moe_intermediate_size": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "mlp_bias": False,
}
_TINY_MOE = {
    "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 3, "intermediate_size": 512,
    "moe_intermediate_size": 128, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "moe-390m": _DEEPSEEK_V3,
    "dense-101m": _LLAMA,
    "moe-tiny": {**_DEEPSEEK_V3, **_TINY_MOE},
    "dense-tiny": {**_LLAMA, "vocab_size": 2048, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
}


def ensure_checkpoint(
    shape: str = "moe-390m", directory: str | Path | None = None, seed: int = 0, **overrides: Any
) -> Path:
    """The directory of the checkpoint, written if missing.

    Args:
        shape: a key of `SHAPES`.
        directory: output directory; by default one in the cache, named after shape, seed and overrides.
        overrides: fields of config.json.

    Raises:
        KeyError: unknown shape.
        ValueError: `directory` has a checkpoint of another shape.
    """
    return write_once(shape, SHAPES[shape] | overrides, directory, seed, random_shards)


def write_once(
    name: str, config: dict[str, Any], directory: str | Path | None, seed: int, make_shards: MakeShards
) -> Path:
    """The directory of the checkpoint with the shards of `make_shards(config, seed)` and a tokenizer; see above."""
    mark = hashlib.sha256(json.dumps([config, seed, _WEIGHTS_VERSION], sort_keys=True).encode()).hexdigest()[:10]
    path = Path(directory) if directory else cache_folder() / "benchmarks" / f"{name}-{mark}"
    if path.exists():
        if json.loads((path / "config.json").read_text()) != config:
            raise ValueError(f"{path} has another checkpoint; choose another --directory or remove it")
        return path
    partial = path.with_name(path.name + f".partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # thousands of small copies: starting threads costs more than it saves
    try:
        write_weights(partial, make_shards(config, seed), num_shards(config))
    finally:
        torch.set_num_threads(threads)
    write_tokenizer(partial, config["vocab_size"], config["max_position_embeddings"])
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (partial / "generation_config.json").write_text(json.dumps(ends))
    try:
        partial.rename(path)
    except OSError:
        shutil.rmtree(partial)  # another process finished first
        if not path.exists():
            raise
    return path


_WEIGHTS_VERSION = 4
"""Part of the cache key: increase it when the random weights change."""
_POOL_MARGIN = 1 << 20


class _Random:
    """Random tensors of one seed: matrices that keep the scale of their input, and norms around 1.

    A tensor is a copy of a window, at a random offset, of one pool of normal values: much faster than fresh random
    values for every weight, and statistically sufficient.
    """

    def __init__(self, seed: int, largest: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._pool = torch.empty(largest + _POOL_MARGIN).normal_(generator=self._generator)
        self._scaled: dict[float, Tensor] = {}

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        size = math.prod(shape)
        if scale not in self._scaled:
            self._scaled[scale] = (self._pool * scale).to(torch.bfloat16)
        start = int(torch.randint(len(self._pool) - size, (1,), generator=self._generator))
        return self._scaled[scale][start : start + size].view(shape).to(dtype, copy=True)

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> Tensor:
        """[rows, columns] so that unit-variance input gives output of variance gain**2."""
        return self.normal(rows, columns, scale=gain * columns**-0.5)

    def norm(self, size: int) -> Tensor:
        return (1 + self.normal(size, scale=0.2)).clamp(0.3, 1.7)


def write_weights(path: Path, shards: Iterable[dict[str, Tensor]], count: int) -> None:
    """The `count` shards, and the index."""
    weight_map: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def num_shards(config: dict[str, Any]) -> int:
    return config["num_hidden_layers"] + 2 + config.get("num_nextn_predict_layers", 0)


def random_shards(config: dict[str, Any], seed: int) -> Iterator[dict[str, Tensor]]:
    """The embedding, a shard per layer, norm and head, a shard per MTP layer."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    draw = _Random(seed, vocab * hidden)
    embedding = draw.normal(vocab, hidden)
    yield {"model.embed_tokens.weight": embedding}
    layers = config["num_hidden_layers"]
    for layer in range(layers):
        yield _layer(draw, layer, config)
    norm, head = draw.norm(hidden), draw.linear(vocab, hidden, gain=LOGIT_SPREAD)
    yield {"model.norm.weight": norm, "lm_head.weight": head}
    for layer in range(layers, layers + config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{name}.weight": draw.norm(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors[f"{prefix}eh_proj.weight"] = draw.linear(hidden, 2 * hidden)
        copies = {f"{prefix}embed_tokens.weight": embedding, f"{prefix}shared_head.head.weight": head}
        yield tensors | _layer(draw, layer, config) | copies


def _layer(draw: _Random, layer: int, config: dict[str, Any]) -> dict[str, Tensor]:
    prefix, hidden, is_mla = f"model.layers.{layer}.", config["hidden_size"], "kv_lora_rank" in config
    tensors = {f"{prefix}{name}.weight": draw.norm(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    tensors |= (_mla if is_mla else _gqa)(draw, prefix + "self_attn.", config)
    if is_mla and layer >= config["first_k_dense_replace"]:
        return tensors | _moe(draw, prefix + "mlp.", config)
    return tensors | _mlp(draw, prefix + "mlp.", hidden, config["intermediate_size"])


def _mla(draw: _Random, prefix: str, config: dict[str, Any]) -> dict[str, Tensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    # Queries with gain 2: attention selects few tokens rather than averaging all, so that the context matters.
    return {
        f"{prefix}q_a_proj.weight": draw.linear(q_rank, hidden),
        f"{prefix}q_a_layernorm.weight": draw.norm(q_rank),
        f"{prefix}q_b_proj.weight": draw.linear(heads * (nope + rope), q_rank, gain=2.0),
        f"{prefix}kv_a_proj_with_mqa.weight": draw.linear(kv_rank + rope, hidden),
        f"{prefix}kv_a_layernorm.weight": draw.norm(kv_rank),
        f"{prefix}kv_b_proj.weight": draw.linear(heads * (nope + value), kv_rank),
        f"{prefix}o_proj.weight": draw.linear(hidden, heads * value),
    }


def _gqa(draw: _Random, prefix: str, config: dict[str, Any]) -> dict[str, Tensor]:
    hidden, size = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    return {
        f"{prefix}q_proj.weight": draw.linear(queries, hidden, gain=2.0),
        f"{prefix}k_proj.weight": draw.linear(keys, hidden),
        f"{prefix}v_proj.weight": draw.linear(keys, hidden),
        f"{prefix}o_proj.weight": draw.linear(hidden, queries),
    }


def _mlp(draw: _Random, prefix: str, hidden: int, width: int) -> dict[str, Tensor]:
    # silu(gate) * up of unit inputs has a variance of about 0.36: the gain of 1.7 brings it back to 1.
    return {
        f"{prefix}gate_proj.weight": draw.linear(width, hidden),
        f"{prefix}up_proj.weight": draw.linear(width, hidden),
        f"{prefix}down_proj.weight": draw.linear(hidden, width, gain=1.7),
    }


def _moe(draw: _Random, prefix: str, config: dict[str, Any]) -> dict[str, Tensor]:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    tensors = {
        f"{prefix}gate.weight": draw.linear(experts, hidden),
        f"{prefix}gate.e_score_correction_bias": draw.normal(experts, scale=0.02, dtype=torch.float32),
    }
    tensors |= _mlp(draw, f"{prefix}shared_experts.", hidden, width * config["n_shared_experts"])
    for expert in range(experts):
        tensors |= _mlp(draw, f"{prefix}experts.{expert}.", hidden, width)
    return tensors


def write_tokenizer(path: Path, vocab_size: int, context_len: int) -> None:
    """A byte-level BPE tokenizer of exactly `vocab_size` entries: special tokens, bytes, then letter pairs and words.

    Raises:
        ValueError: fewer entries than bytes and special tokens, or more than there are words of four letters.
    """
    from tokenizers import Tokenizer, models

    alphabet = sorted(byte_alphabet())
    symbols = [*SPECIAL_TOKENS, *alphabet]
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    pairs = [(a, b) for a, b in itertools.product(letters, repeat=2)]
    spaced = [("Ġ", a + b) for a, b in pairs]
    words = (("Ġ" + a, b) for a, b in itertools.product(map("".join, pairs), repeat=2))
    room = vocab_size - len(symbols)
    merges = list(itertools.islice(itertools.chain(pairs, spaced, words), max(room, 0)))
    if len(merges) != room:
        raise ValueError(
            f"a vocabulary of {vocab_size} is not possible; it must have {len(symbols)} to about 458,000 entries"
        )
    vocab = {symbol: i for i, symbol in enumerate([*symbols, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    save_tokenizer(tokenizer, path, context_len)


def save_tokenizer(tokenizer: Tokenizer, path: Path, context_len: int) -> None:
    """Completes a byte-level tokenizer with the special tokens and the chat template, and writes its files."""
    from tokenizers import AddedToken, decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[1],
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_len,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1))


def parse_overrides(pairs: list[str]) -> dict[str, Any]:
    """``["num_hidden_layers=3"]`` -> ``{"num_hidden_layers": 3}``. Raises ValueError for text without ``=``."""
    overrides: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set {pair}: write field=value")
        try:
            overrides[key] = json.loads(value)
        except json.JSONDecodeError:
            overrides[key] = value
    return overrides


def main(argv: list[str] | None = None) -> int:
    parser = report.command_parser("checkpoints", __doc__)
    parser.add_argument("shape", nargs="?", default="moe-390m", choices=sorted(SHAPES))
    parser.add_argument("--directory", help="output folder (default: the cache)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="changes to config.json")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    path = ensure_checkpoint(args.shape, args.directory, args.seed, **parse_overrides(args.set))
    print(f"{args.shape}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
