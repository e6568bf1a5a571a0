"""Checks a draft head against the model that it drafts for, by both configs, before a weight is read."""

from __future__ import annotations

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models import registry
from moe_engine.models.config import ModelConfig
from moe_engine.models.eagle_config import HeadConfig
from moe_engine.models.widths import widths_of
from moe_engine.parallel.topology import Topology
from moe_engine.planning.resolution_log import Record

PATH = "--speculative-draft-model-path"


def algorithm_of(head: HeadConfig) -> str:
    if head.block is not None:
        return head.block.algorithm
    return "EAGLE3" if head.is_eagle3 else "EAGLE"


def refuse_token_map(args: EngineArgs, method: str) -> None:
    """Raises ConfigError for a token map without a head that uses it."""
    path = args.speculative.speculative_token_map
    if path is not None and method != "eagle":
        raise ConfigError(
            f"--speculative-token-map {path}: restricts the drafts of an EAGLE head in {PATH}, and "
            f"--speculative-algorithm {args.speculative.speculative_algorithm} drafts without one; drop the map"
        )


def check_head(args: EngineArgs, model: ModelConfig, head: HeadConfig | None, context_len: int, record: Record) -> None:
    """Raises ConfigError: there is no head, or it was made for another model; both are named."""
    algorithm = args.speculative.speculative_algorithm
    if head is None:
        kind = {"DFLASH": "a DFlash head", "DSPARK": "a DSpark head"}.get(str(algorithm), "an EAGLE-3 head")
        other = "NEXTN the MTP layers of the model's own checkpoint draft"
        if not model.num_nextn_predict_layers:
            other = "NGRAM the text of the requests drafts"
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs {kind} for {model.source} in {PATH}; with "
            f"--speculative-algorithm {other}"
        )
    if algorithm != algorithm_of(head) and (algorithm != "NEXTN" or head.block is not None):
        raise ConfigError(
            f"{PATH} {head.path}: {head.a_kind}, and --speculative-algorithm is {algorithm}; use {algorithm_of(head)}"
        )
    if not registry.is_built_in(model.architecture):
        raise NotAvailableYet(f"{PATH} {head.path}: heads for external models ({model.architecture})")
    if model.lone_feed_forwards is not None:
        raise NotAvailableYet(
            f"{PATH} {head.path}: heads for {model.architecture}, whose states are counted in layers of one mixer"
        )
    layer = head.layer
    for name, ours, theirs in (
        ("hidden_size", model.hidden_size, head.target_hidden),
        ("vocab_size", model.vocab_size, layer.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(
                f"{PATH} {head.path}: a head for another model: its {name} is {theirs}, and that of {model.source} is "
                f"{ours}"
            )
    if layer.hidden_size != model.hidden_size:
        raise ConfigError(
            f"{PATH} {head.path}: hidden_size is {layer.hidden_size}, and the embedding of {model.source}, which the "
            f"head reads, has {model.hidden_size}; give a head that was trained for this model"
        )
    if head.layer.max_position_embeddings < context_len:
        record.remark(
            f"{PATH}: the head was trained for {head.layer.max_position_embeddings} positions, and requests may have "
            f"{context_len}: behind them fewer drafts may be accepted"
        )
    if args.speculative.speculative_token_map is not None and head.own_head:
        record.remark("--speculative-token-map: no effect, the head has an LM head over its own tokens")


def check_own_block(args: EngineArgs, model: ModelConfig) -> None:
    """Raises ConfigError: the draft layers of the model's checkpoint do not fill in blocks as asked."""
    algorithm = args.speculative.speculative_algorithm
    assert model.own_block is not None
    if algorithm != model.own_block.block.algorithm:
        raise ConfigError(
            f"--speculative-algorithm {algorithm}: {model.source} has DSpark layers; use --speculative-algorithm DSPARK"
        )
    if model.stored_layers != model.num_layers and args.model.load_format != "dummy":
        raise ConfigError(
            f"--speculative-algorithm {algorithm} with num_hidden_layers {model.num_layers} in "
            f"--json-model-override-args: the draft layers follow layer {model.stored_layers - 1}, which the override "
            "removes; drop one of them"
        )


def check_sharding(head: HeadConfig, topology: Topology) -> None:
    """Raises ConfigError: the ranks that share the model cannot share the head's layers."""
    if head.layer.num_layers > 1 and head.block is None and topology.attn_dp_size > 1:
        raise ConfigError(
            f"{PATH} {head.path}: a head of {head.layer.num_layers} layers needs a single attention group, and "
            f"--attn-dp-size is {topology.attn_dp_size}"
        )
    try:
        topology.check(widths_of(head.layer))
    except ConfigError as error:
        raise ConfigError(f"{PATH} {head.path}: {error}") from None
