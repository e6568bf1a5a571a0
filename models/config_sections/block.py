"""Drafters that fill in a block of tokens in one forward: DFlash (arXiv 2602.06036) and DSpark (2607.05147), as heads
of their own and as layers in the model's checkpoint (DeepSeek V4). Their fields of config.json. Imports no torch.

A block starts with the last token; mask tokens follow. DFlash's output at a mask predicts the token at its own
position, so that the first output is not used. DSpark's outputs predict the token at the next position; a Markov head
adds a bias by the token before, which makes the drafts of a block consistent. (In the format of the speculators
library, heads of either kind may predict either position.) DSpark's confidence head, which other engines use to choose
the number of drafts, is not read: ``--speculative-num-steps auto`` measures acceptance instead.

Legend: B tokens of a block, D hidden, V vocabulary, R rank of the Markov head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from moe_engine.errors import ConfigError

MARKOV = "markov_head"
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
_ARCHITECTURES = ("DFlash", "DSpark")
_LAYERS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
"""Architecture of the decoder layers, by model_type."""
_MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class BlockConfig:
    """A block of tokens.

    Attributes:
        size: tokens B of a block in training; shorter blocks are valid too.
        mask_id: id of the mask token.
        is_dspark: a DSpark head; else DFlash.
        skips_first: the first output of a block predicts nothing.
        is_causal: whether the tokens of a block see those after them, if config.json says so for all layers. None:
            layers with a window are causal, others are not.
        markov_rank: R; 0: no Markov head (DFlash).
        markov_head: ``vanilla``, ``gated`` or ``rnn``.
    """

    size: int
    mask_id: int
    is_dspark: bool
    skips_first: bool
    markov_rank: int = 0
    markov_head: str = ""
    is_causal: bool | None = None

    @property
    def kind(self) -> str:
        return "DSpark head" if self.is_dspark else "DFlash head"

    @property
    def algorithm(self) -> str:
        return "DSPARK" if self.is_dspark else "DFLASH"

    @property
    def max_drafts(self) -> int:
        """Drafts of a block of B tokens."""
        return self.size - self.skips_first

    def tokens(self, num_drafts: int) -> int:
        """Tokens of a block that yields this number of drafts."""
        return num_drafts + self.skips_first


@dataclass(frozen=True)
class OwnBlock:
    """Layers in the model's own checkpoint that fill in blocks.

    Attributes:
        tapped: the numbers of model layers after which they read the hidden states.
        num_experts, top_k: experts of such a layer, and of a token in it; 0: as in the model's layers.
    """

    block: BlockConfig
    tapped: tuple[int, ...]
    num_experts: int = 0
    top_k: int = 0


def is_block_head(names: Collection[str]) -> bool:
    """Whether a checkpoint with these architectures fills in blocks."""
    return any(own in name for name in names for own in _ARCHITECTURES)


def layer_architecture(file: str, raw: Mapping[str, Any]) -> str:
    """The architecture whose decoder layers the head has. Raises ConfigError: they are not supported."""
    kind = str(raw.get("model_type"))
    if kind not in _LAYERS:
        known = ", ".join(sorted(_LAYERS))
        raise ConfigError(f"{file}: model_type {kind}: a head that fills in blocks must have layers of {known}")
    return _LAYERS[kind]


def read_block(file: str, names: Collection[str], raw: Mapping[str, Any], vocab_size: int) -> BlockConfig:
    """The block of a head. DFlash's fields are in ``dflash_config`` or next to it, DSpark's in ``dspark_config`` or
    next to it.

    Raises:
        ConfigError: a field is missing or has a value that is not supported.
    """
    section = {**_section(raw, "dflash_config"), **_section(raw, "dspark_config")}
    fields = {**raw, **section}
    is_dspark = any("DSpark" in name for name in names) or fields.get("projector_type") == "dspark"
    size = _integer(file, fields, "block_size")
    mask = _integer(file, fields, "mask_token_id")
    skips_first = not fields.get("sample_from_anchor", is_dspark)
    if size < 1 + skips_first:
        raise ConfigError(f"{file}: block_size {size}: a block has at least {1 + skips_first} tokens")
    if not 0 <= mask < vocab_size:
        raise ConfigError(
            f"{file}: mask_token_id {mask}: the vocabulary has {vocab_size} tokens; the head belongs to another model"
        )
    causal = False if fields.get("sliding_window_non_causal") else fields.get("is_causal", fields.get("causal"))
    if causal not in (None, True, False):
        raise ConfigError(f"{file}: is_causal {causal!r}: must be true or false")
    if not is_dspark:
        return BlockConfig(size, mask, is_dspark, skips_first, is_causal=causal)
    rank = _integer(file, fields, "markov_rank")
    head = str(fields.get("markov_head_type", "vanilla")).lower()
    if rank < 0 or head not in _MARKOV_HEADS:
        raise ConfigError(
            f"{file}: markov_rank {rank}, markov_head_type {head}: supported are ranks from 0 on, and "
            f"{', '.join(_MARKOV_HEADS)}"
        )
    return BlockConfig(
        size, mask, is_dspark, skips_first, markov_rank=rank, markov_head=head if rank else "", is_causal=causal
    )


def block_taps(file: str, raw: Mapping[str, Any], num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Taps, as numbers of target layers before each: ``target_layer_ids`` names the layer whose output is read, -1 the
    embedding. By default DFlash reads one layer for each of its own, evenly spaced.

    Args:
        num_layers: of the head.
    """
    fields = {**raw, **_section(raw, "dflash_config"), **_section(raw, "dspark_config")}
    given = fields.get("target_layer_ids")
    if given is None:
        if num_layers == 1:
            return (num_target_layers // 2 + 1,)
        first, last = 1, num_target_layers - 3
        if last < first:
            raise ConfigError(f"{file}: target_layer_ids is missing; add the layers whose outputs the head reads")
        return tuple(round(first + i * (last - first) / (num_layers - 1)) + 1 for i in range(num_layers))
    if not isinstance(given, list) or not given or not all(isinstance(i, int) for i in given):
        raise ConfigError(f"{file}: target_layer_ids must be a list of layers, found {given!r}")
    if given != sorted(set(given)) or not -1 <= given[0] <= given[-1] < num_target_layers:
        raise ConfigError(
            f"{file}: target_layer_ids {given}: the model has layers 0 to {num_target_layers - 1} (-1: the embedding), "
            "and each is named once, in their order; the head belongs to another model"
        )
    return tuple(i + 1 for i in given)


def own_block(
    file: str, raw: Mapping[str, Any], num_layers: int, vocab_size: int, reads_inputs: bool = False
) -> OwnBlock | None:
    """The DSpark layers in a model's checkpoint; None: it has none.

    Args:
        num_layers: of the model.
        reads_inputs: they read the hidden states before the named layers, not those after them.

    Raises:
        ConfigError: a field is missing or has a value that is not supported.
    """
    if not raw.get("dspark_block_size"):
        return None
    names = {
        "dspark_block_size": "block_size", "dspark_noise_token_id": "mask_token_id",
        "dspark_target_layer_ids": "target_layer_ids", "dspark_markov_rank": "markov_rank",
        "dspark_markov_head_type": "markov_head_type",
    }  # fmt: skip
    fields = {name: raw[own] for own, name in names.items() if raw.get(own) is not None}
    block = read_block(file, ["DSpark"], fields, vocab_size)
    tapped = block_taps(file, {"target_layer_ids": [], **fields}, 1, num_layers)
    if reads_inputs and tapped[0] == 0:
        raise ConfigError(f"{file}: dspark_target_layer_ids has -1: the layers read states before layers of the model")
    if reads_inputs:
        tapped = tuple(count - 1 for count in tapped)
    return OwnBlock(block, tapped)


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = raw.get(name)
    return found if isinstance(found, Mapping) else {}


def _integer(file: str, fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{file}: {name} must be a whole number, found {value!r}")
    return value
