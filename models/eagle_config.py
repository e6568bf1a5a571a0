"""Draft heads: fields of config.json and headers of a published head, and the tensors that it has. Imports no torch.

A head drafts from hidden states of the model that it was trained for (the target). EAGLE-1 and -2 (arXiv 2401.15077,
2406.16858) read the last hidden state, EAGLE-3 (2503.01840) those of three layers, joined by `fc`. Names of tensors are
those of the authors' repository and of SpecForge, with or without ``model.`` before them. Heads that fill in blocks
(`models.config_sections.block`) read the states of several layers too.

Legend: D hidden, F width of the states that `fc` reads, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.models import registry
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_file import load_model_config
from moe_engine.models.config_parsers.vision import rotary_axes
from moe_engine.models.config_sections.block import (
    CONFIDENCE,
    BlockConfig,
    block_taps,
    is_block_head,
    layer_architecture,
    read_block,
)
from moe_engine.models.config_sections.fields import Fields, read_json
from moe_engine.models.speculators_config import is_speculators, published_fields
from moe_engine.models.tensors.model import KV_SCALES, Kind, TensorSpec, block_tensors, layer_tensors

LAYERS = "model.layers"
"""Prefix of the head's decoder layers, under the names of `checkpoint_files.read_head`."""
LAYER = f"{LAYERS}.0"
LM_HEAD = "lm_head.weight"
_EAGLE = re.compile(r"eagle3?", re.IGNORECASE)
_INPUTS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")
"""Projections of a layer's input. (With a query latent, ``q_b_proj`` reads the latent.)"""
_UNREAD = ("embed_tokens.weight", "t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's embedding; the inverse of d2t; tables of rotary frequencies; what training compares with."""


@dataclass(frozen=True)
class HeadConfig:
    """One EAGLE head, or a head that fills in blocks.

    Attributes:
        path: its folder.
        layer: a model of the head's decoder layers (published heads have one); `vocab_size` is the target's.
        is_eagle3: the first layer reads embedding and state side by side (2D) after a norm of each, instead of `fc` of
            both.
        tapped: the numbers of target layers after which the head reads the hidden states (0: the embedding); (): the
            last hidden state, after the final norm.
        target_hidden: width of a target's hidden state.
        own_head: rows W of the head's own LM head; 0: it uses the target's.
        has_ids: d2t is stored: the target's id of each of the W tokens.
        has_bias: `fc` has a bias.
        norms_residual: the residual stream starts with the normed state, not with the state itself.
        norms_states: each state has a norm before `fc`.
        norms_joined: the states side by side have a norm before `fc`, and before `norms_states`.
        norms_output: a draft step passes on its result after the final norm, not before it.
        token_map: file of the frequent tokens (`models.drafts.token_map`), the only ones that the head drafts, with
            their rows of the target's LM head; "": none.
        num_mapped: number of these tokens.
        block: of a head that fills in blocks; None: an EAGLE head.
    """

    path: str
    layer: ModelConfig
    is_eagle3: bool
    tapped: tuple[int, ...]
    target_hidden: int
    own_head: int = 0
    has_ids: bool = False
    has_bias: bool = False
    norms_residual: bool = False
    norms_states: bool = False
    norms_joined: bool = False
    norms_output: bool = False
    token_map: str = ""
    num_mapped: int = 0
    block: BlockConfig | None = None

    @property
    def kind(self) -> str:
        if self.block is not None:
            return self.block.kind
        return "EAGLE-3 head" if self.is_eagle3 else "EAGLE head"

    @property
    def a_kind(self) -> str:
        """`kind` with its article."""
        return f"{'a' if self.block is not None else 'an'} {self.kind}"

    @property
    def draft_vocab(self) -> int:
        """Tokens W that it may draft."""
        return self.own_head or self.num_mapped or self.layer.vocab_size

    @property
    def num_states(self) -> int:
        """Hidden states of a token that `fc` joins."""
        return len(self.tapped) if self.is_eagle3 or self.block is not None else 1

    @property
    def has_fc(self) -> bool:
        return not self.is_eagle3 or bool(self.tapped)

    @property
    def joined_width(self) -> int:
        """Width of the input of `fc`: of the states, for EAGLE-1 and -2 of embedding and state."""
        states = self.num_states * self.target_hidden
        return states if self.is_eagle3 or self.block is not None else self.layer.hidden_size + states

    @property
    def attention_input(self) -> int:
        """Width of the attention's input."""
        return 2 * self.layer.hidden_size if self.is_eagle3 else self.layer.hidden_size


def is_head(names: Collection[str], tensors: Collection[str]) -> bool:
    """Whether a checkpoint with these architectures and tensors is a draft head. The authors' EAGLE-2 heads name the
    target's architecture; their tensors distinguish them."""
    return is_block_head(names) or any(_EAGLE.search(name) for name in names) or "fc.weight" in tensors


def read_head_config(folder: Path, files: Mapping[str, WeightFile], num_target_layers: int) -> HeadConfig:
    """The head in a folder.

    Args:
        files: from `checkpoint_files.read_head`; empty: random weights (``--load-format dummy``).
        num_target_layers: layers of the model that the head drafts for.

    Raises:
        ConfigError: config.json is broken, or describes a head that is not supported.
    """
    file = folder / "config.json"
    raw = read_json(file)
    nested = is_speculators(raw)
    raw = published_fields(str(file), raw) if nested else raw
    fields, eagle = Fields(raw, str(file)), _section(raw)
    names = [str(name) for name in raw.get("architectures") or []]
    is_eagle3 = _is_eagle3(names, files)
    fills = is_block_head(names)
    layer = _layer(folder, [layer_architecture(str(file), raw)] if fills else names, raw if nested else {})
    if layer.is_moe:
        raise ConfigError(f"{file}: a head with experts is not supported; its layers must be dense")
    if layer.windows and not fills:
        raise ConfigError(f"{file}: an EAGLE head with a sliding window is not supported; it must see all positions")
    if any(name.endswith(("enorm.weight", "hnorm.weight")) for name in files):
        raise ConfigError(
            f"{file}: the head has enorm and hnorm, as MTP layers have; export it as one (...NextN in architectures, "
            "eh_proj for fc)"
        )
    axes = rotary_axes(fields, layer.rope.width // 2)
    layer = replace(layer, rope=replace(layer.rope, axes=axes))
    if fills:
        block = read_block(str(file), names, raw, layer.vocab_size)
        if layer.windows and block.is_causal is False:
            raise ConfigError(
                f"{file}: sliding_window_non_causal, or is_causal false: a window that sees the whole block is not "
                "supported; layers with a window must be causal"
            )
        taps = block_taps(str(file), raw, layer.num_layers, num_target_layers)
        hidden = fields.integer("target_hidden_size", None) or layer.hidden_size
        return _with_vocabulary(HeadConfig(str(folder), layer, False, taps, hidden, block=block), fields, files)
    reads_taps = is_eagle3 and eagle.get("use_aux_hidden_state", True)
    head = HeadConfig(
        path=str(folder),
        layer=layer,
        is_eagle3=is_eagle3,
        tapped=_tapped(file, raw, eagle, num_target_layers) if reads_taps else (),
        target_hidden=fields.integer("target_hidden_size", None) or layer.hidden_size,
        has_bias="fc.bias" in files,
        norms_residual=is_eagle3 and fields.flag("norm_before_residual"),
        norms_states=reads_taps and bool(raw.get("fc_norm") or raw.get("use_aux_norm")),
        norms_joined=reads_taps and bool(eagle.get("norm_before_fc", raw.get("norm_before_fc"))),
        norms_output=is_eagle3 and fields.flag("norm_output"),
    )
    return _with_vocabulary(head, fields, files)


def head_tensors(head: HeadConfig) -> Iterator[TensorSpec]:
    """All tensors of a head that are read, under the names of `checkpoint_files.read_head`; d2t aside."""
    hidden = head.layer.hidden_size
    if head.has_fc:
        yield TensorSpec("fc.weight", (hidden, head.joined_width))
        if head.has_bias:
            yield TensorSpec("fc.bias", (hidden,), Kind.PLAIN)
    if head.norms_joined:
        yield TensorSpec("input_norm.weight", (head.num_states * head.target_hidden,), Kind.WIDE)
    if head.norms_states:
        for i in range(head.num_states):
            yield TensorSpec(f"fc_norm.{i}.weight", (head.target_hidden,), Kind.WIDE)
    for spec in layer_tensors(head.layer, False):
        if head.is_eagle3 or head.block is not None or spec.name != "input_layernorm.weight":
            yield _widened(spec, head.attention_input).within(LAYER)
        yield from (spec.within(f"{LAYERS}.{i}") for i in range(1, head.layer.num_layers))
    if head.is_eagle3:
        yield TensorSpec(f"{LAYER}.hidden_norm.weight", (hidden,), Kind.WIDE)
        yield TensorSpec("norm.weight", (hidden,), Kind.WIDE)
    if head.block is not None:
        yield TensorSpec("hidden_norm.weight", (hidden,), Kind.WIDE)
        yield TensorSpec("norm.weight", (hidden,), Kind.WIDE)
        yield from block_tensors(head.block, hidden, head.layer.vocab_size, head.draft_vocab)
    if head.own_head:
        yield TensorSpec(LM_HEAD, (head.own_head, hidden))


def names_outside_head(head: HeadConfig, names: Collection[str]) -> set[str]:
    """Tensors of a head's files that it does not need."""
    unread = (*_UNREAD, *KV_SCALES, *(() if head.own_head else (LM_HEAD,)))
    unread += CONFIDENCE if head.block is not None else ()
    further = tuple(f"{LAYERS}.{i}.hidden_norm.weight" for i in range(1, head.layer.num_layers))
    return {name for name in names if name.endswith(unread) or name in further}


def _widened(spec: TensorSpec, width: int) -> TensorSpec:
    """A projection of the attention's input, for an input of that width."""
    if len(spec.shape) == 2 and spec.name.removeprefix("self_attn.").removesuffix(".weight") in _INPUTS:
        return replace(spec, shape=(spec.shape[0], width))
    return spec


def _section(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    eagle = raw.get("eagle_config")
    return eagle if isinstance(eagle, Mapping) else {}


def _is_eagle3(names: Collection[str], files: Mapping[str, WeightFile]) -> bool:
    if any("eagle3" in name.lower() for name in names):
        return True
    return f"{LAYER}.hidden_norm.weight" in files


def _layer(folder: Path, names: Collection[str], fields: Mapping[str, Any]) -> ModelConfig:
    """The decoder layers as a model of their family: the architecture's name without Eagle. `fields`: which config.json
    has elsewhere."""
    file = folder / "config.json"
    plain = [_EAGLE.sub("", name) for name in names]
    known = [name for name in plain if name in registry.supported()]
    if names and not known:
        raise ConfigError(
            f"{file}: architectures {', '.join(names)}: no head on the layers of {', '.join(plain)} is supported; "
            "supported: those of Llama, Qwen, DeepSeek and Kimi"
        )
    return load_model_config(folder, {**fields, "architectures": known, "n_routed_experts": None})


def _tapped(file: Path, raw: Mapping[str, Any], eagle: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Taps, as numbers of layers before each. `eagle_config` (SGLang, ModelOpt) names the layer whose output is read,
    the field outside it (vLLM) the layer whose input is read. By default EAGLE-3 reads the inputs of layers 2, n / 2
    and n - 3."""
    field = "eagle_aux_hidden_state_layer_ids"
    nested = bool(eagle.get(field))
    name, given = (f"eagle_config.{field}", eagle[field]) if nested else (field, raw.get(field))
    if given is None or given == []:
        if num_layers < 8:
            raise ConfigError(
                f"{file}: eagle_config.{field} is missing, and a model of {num_layers} layers has no layers 2, n / 2 "
                "and n - 3 in this order; add the field"
            )
        return (2, num_layers // 2, num_layers - 3)
    if not isinstance(given, list) or not all(isinstance(i, int) for i in given):
        raise ConfigError(f"{file}: {name} must be a list of layers, found {given!r}")
    last = num_layers - 1 if nested else num_layers
    if given != sorted(set(given)) or not 0 <= given[0] <= given[-1] <= last:
        raise ConfigError(
            f"{file}: {name} {given}: the model has layers 0 to {num_layers - 1}, and each is named once, in their "
            "order; the head belongs to another model"
        )
    return tuple(i + 1 for i in given) if nested else tuple(given)


def _with_vocabulary(head: HeadConfig, fields: Fields, files: Mapping[str, WeightFile]) -> HeadConfig:
    """The config with the head's own vocabulary: that of its LM head, if it has one. A head that fills in blocks may
    have a copy of the target's."""
    count = fields.integer("draft_vocab_size", None) or head.layer.vocab_size
    if not head.is_eagle3 and (head.block is None or count == head.layer.vocab_size):
        return head
    stored = files.get(LM_HEAD)
    if files and stored is None:
        if count != head.layer.vocab_size:
            raise ConfigError(
                f"{fields.source}: draft_vocab_size is {count}, and the head has no lm_head.weight; that of the model "
                f"has {head.layer.vocab_size} tokens"
            )
        return head
    has_ids = "d2t" in files or (not files and count != head.layer.vocab_size)
    if count != head.layer.vocab_size and not has_ids:
        raise ConfigError(
            f"{fields.source}: draft_vocab_size is {count} of {head.layer.vocab_size} tokens, and the head has no d2t, "
            "which names them"
        )
    return replace(head, own_head=count, has_ids=has_ids)
