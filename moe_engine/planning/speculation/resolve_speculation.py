"""Resolves the speculative flags to a `SpeculationConfig`; errors name the flag and the fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.config.field import fields_of, option_of
from moe_engine.config.speculative import SpeculativeArgs
from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.block import BlockConfig
from moe_engine.models.eagle_config import HeadConfig
from moe_engine.models.tensors.model import UNREAD_MTP, has_mtp_names
from moe_engine.models.widths import local_heads
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.speculation.draft_tree import TREE, Tree, resolve_tree
from moe_engine.planning.speculation.eagle_checks import algorithm_of, check_head, check_own_block, refuse_token_map
from moe_engine.types import SpeculationConfig

METHODS = {
    "NEXTN": "nextn", "EAGLE": "nextn", "EAGLE3": "eagle", "DFLASH": "block", "DSPARK": "block",
    "STANDALONE": "standalone", "NGRAM": "ngram",
}  # fmt: skip
"""Drafter by algorithm. NEXTN and EAGLE mean ``eagle`` if --speculative-draft-model-path has an EAGLE head."""
UNUSED_TREES = {("5", "8", "64"), ("5", "4", "8")}
"""Steps, topk and tokens in dumps of SGLang 0.4 without speculative decoding (its defaults)."""
NGRAM_WINDOW = ("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size")


@dataclass(frozen=True)
class DraftModel:
    """The draft model of --speculative-draft-model-path: its local folder and its config.json.

    is_nextn: it is an MTP layer exported on its own, and `config` describes a model with this layer alone. `head`: it
    is an EAGLE head, and `config` describes its layer. `latent_scales`: of its checkpoint, as in `CheckpointFacts`,
    except of an MTP layer.
    """

    path: str
    config: ModelConfig
    is_nextn: bool = False
    head: HeadConfig | None = None
    latent_scales: Mapping[int, float] = field(default_factory=dict)

    def local(self, attn_tp_size: int) -> ModelConfig:
        """Its config on one rank. Ranks share the attention heads of an EAGLE head; each runs a whole draft model."""
        return self.config if self.head is None else local_heads(self.config, attn_tp_size)


def resolve_speculation(
    args: EngineArgs, model: ModelConfig, draft: DraftModel | None, context_len: int, record: Record
) -> SpeculationConfig | None:
    """The drafter and the shape of its trees; None without --speculative-algorithm.

    Args:
        draft: the draft model, if the flags name one.
        record: collects the automatic values with their reasons, and remarks.

    Raises:
        ConfigError: naming the flag and the fix.
    """
    flags = args.speculative
    if flags.speculative_algorithm is None:
        _refuse_without_algorithm(args, record)
        return None
    method = METHODS[flags.speculative_algorithm]
    if method == "nextn" and draft is not None and draft.head is not None:
        method = "eagle"
    own = method == "nextn" or (method == "block" and model.own_block is not None)
    if own and draft is not None and draft.config.source == model.source:
        draft = None  # the model's own checkpoint, which many SGLang commands name explicitly
    _check_drafter(args, method, model, draft, context_len, record)
    _check_thresholds(flags, record)
    _check_window(args, method)
    tree = resolve_tree(args, method, _block(method, model, draft), record)
    _check_simulation(flags, tree, record)
    if tree.topk > 1:
        _check_branches(args, tree.topk, model, draft, context_len)
    if draft is not None:
        record.note("speculative_draft_model_path", draft.path, "the local folder")
    return SpeculationConfig(
        method=method,
        num_steps=tree.steps,
        topk=tree.topk,
        num_draft_tokens=tree.nodes,
        auto_depth=tree.auto_depth,
        accept_threshold_single=flags.speculative_accept_threshold_single,
        accept_threshold_acc=flags.speculative_accept_threshold_acc,
        simulated_accept_length=flags.speculative_simulated_accept_length,
        draft_model_path=draft.path if draft is not None else None,
        ngram_min_match=flags.speculative_ngram_min_match_window_size,
        ngram_max_match=flags.speculative_ngram_max_match_window_size,
    )


def speculative_values(speculation: SpeculationConfig) -> dict[str, Any]:
    """The resolved values by their names in /server_info; `num_steps` is the maximum of a step."""
    return {
        "speculative_num_steps": speculation.num_steps,
        "speculative_eagle_topk": speculation.topk,
        "speculative_num_draft_tokens": speculation.num_draft_tokens,
        "speculation": dataclasses.asdict(speculation),
    }


def _refuse_without_algorithm(args: EngineArgs, record: Record) -> None:
    tree = tuple(str(getattr(args.speculative, name)) for name in TREE)
    if tree in UNUSED_TREES:
        options = ", ".join(f"{option_of(name)} {value}" for name, value in zip(TREE, tree))
        record.remark(f"{options}: no effect (SGLang's values when there is no --speculative-algorithm)")
        return
    for info in fields_of(SpeculativeArgs):
        value = getattr(args.speculative, info.name)
        if info.name in args.given and value != info.default and value not in ("0", 0):
            raise ConfigError(
                f"{info.option} {value} needs --speculative-algorithm: NEXTN for a checkpoint with MTP layers, "
                "STANDALONE for a draft model, NGRAM for any model"
            )


# -- the drafter


def _check_drafter(
    args: EngineArgs, method: str, model: ModelConfig, draft: DraftModel | None, context_len: int, record: Record
) -> None:
    refuse_token_map(args, method)
    path = args.speculative.speculative_draft_model_path
    if method == "ngram" and path is not None:
        raise ConfigError(
            f"--speculative-draft-model-path {path}: --speculative-algorithm NGRAM drafts from the text and has no "
            "draft model; drop the path, or use STANDALONE"
        )
    if method == "nextn":
        _check_mtp(args, model, draft)
    elif method == "block" and draft is None and model.own_block is not None:
        check_own_block(args, model)
    elif method in ("eagle", "block"):
        check_head(args, model, None if draft is None else draft.head, context_len, record)
    elif method == "standalone":
        if draft is None:
            raise ConfigError(
                "--speculative-algorithm STANDALONE needs --speculative-draft-model-path: the folder of a small model "
                f"with the vocabulary of {model.source}"
            )
        if draft.is_nextn:
            raise ConfigError(
                f"--speculative-draft-model-path {draft.path}: an MTP layer exported on its own; use "
                "--speculative-algorithm NEXTN"
            )
        if draft.head is not None:
            raise ConfigError(
                f"--speculative-draft-model-path {draft.path}: {draft.head.a_kind}; use --speculative-algorithm "
                f"{algorithm_of(draft.head)}"
            )
        _check_standalone(model, draft, context_len)


def _block(method: str, model: ModelConfig, draft: DraftModel | None) -> BlockConfig | None:
    """The blocks that the drafter fills in."""
    if method != "block":
        return None
    if draft is not None and draft.head is not None:
        return draft.head.block
    return None if model.own_block is None else model.own_block.block


def _check_mtp(args: EngineArgs, model: ModelConfig, draft: DraftModel | None) -> None:
    asked = f"--speculative-algorithm {args.speculative.speculative_algorithm}"
    if draft is not None and not draft.is_nextn:
        raise ConfigError(
            f"--speculative-draft-model-path {draft.path}: a complete model; {asked} drafts with the model's own MTP "
            "layers (leave the path out), with an MTP layer exported on its own (...NextN in architectures) or with an "
            "EAGLE head; use --speculative-algorithm STANDALONE for a complete draft model"
        )
    if model.own_block is not None:
        raise ConfigError(
            f"{asked}: the draft layers of {model.source} fill in blocks, and are no MTP layers; use "
            "--speculative-algorithm DSPARK"
        )
    has_mtp = model.num_nextn_predict_layers or model.architecture in UNREAD_MTP
    if has_mtp and not has_mtp_names(model):
        raise NotAvailableYet(
            f"{asked}: not supported yet: MTP layers of {model.architecture} (only those of DeepSeek, GLM, Hy3, "
            "ERNIE 4.5, MiniMax-M3, Step 3.5, Nemotron-3 and Qwen are); use NGRAM"
        )
    if not model.num_nextn_predict_layers:
        raise ConfigError(
            f"{asked}: {model.source} has no multi-token-prediction layers (num_nextn_predict_layers is 0); "
            "give an EAGLE head in --speculative-draft-model-path, or use NGRAM, which needs no weights, or STANDALONE "
            "with a draft model"
        )
    if model.draft_streams is not None and model.num_nextn_predict_layers > 1:
        raise NotAvailableYet(
            f"{asked}: not supported yet: {model.num_nextn_predict_layers} MTP layers of {model.architecture}, which "
            "have heads of their own; use NGRAM"
        )
    if model.stored_layers != model.num_layers and args.model.load_format != "dummy":
        raise ConfigError(
            f"{asked} with num_hidden_layers {model.num_layers} in --json-model-override-args: "
            f"the MTP layers follow layer {model.stored_layers - 1}, which the override removes; drop one of them"
        )


def _check_standalone(model: ModelConfig, draft: DraftModel, context_len: int) -> None:
    if draft.config.vocab_size != model.vocab_size:
        raise ConfigError(
            f"--speculative-draft-model-path {draft.path}: a vocabulary of {draft.config.vocab_size} tokens, and "
            f"{model.source} has {model.vocab_size}; a draft model must have the same vocabulary"
        )
    if (longest := draft.config.longest_context) < context_len:
        raise ConfigError(
            f"--speculative-draft-model-path {draft.path}: its context length is {longest} tokens, "
            f"and requests may have {context_len}; use --context-length {longest}, or another "
            "draft model"
        )


def _check_branches(
    args: EngineArgs, topk: int, model: ModelConfig, draft: DraftModel | None, context_len: int
) -> None:
    """Raises ConfigError for what runs chains only."""
    flag = f"--speculative-eagle-topk {topk} with"
    if args.backends.enable_deterministic_inference:
        raise ConfigError(
            f"{flag} --enable-deterministic-inference: prompt chunks in one batch with draft trees use another form of "
            "attention; use --speculative-eagle-topk 1, or drop the other flag"
        )
    if model.state_groups:
        raise ConfigError(
            f"{flag} {model.source}: layers with a state for each request need chains; use --speculative-eagle-topk 1"
        )
    for config in (model, *([] if draft is None else [draft.config])):
        short = config.within(context_len)
        if short.windows:
            window = min(own for own in short.windows if own is not None)
            shorter = f", or --context-length {window}" if not short.keeps_windows else ""
            raise ConfigError(
                f"{flag} {short.source}: draft trees need layers without a sliding window; use "
                f"--speculative-eagle-topk 1{shorter}"
            )


# -- numeric flags


def _check_thresholds(flags: SpeculativeArgs, record: Record) -> None:
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        value = getattr(flags, name)
        if not 0 < value <= 1:
            raise ConfigError(f"{option_of(name)} {value:g}: must be above 0 and at most 1 (1: lossless)")
        if value < 1:
            record.remark(f"{option_of(name)} {value:g}: not lossless, accepts drafts that the model might not sample")


def _check_simulation(flags: SpeculativeArgs, tree: Tree, record: Record) -> None:
    length, option = flags.speculative_simulated_accept_length, "--speculative-simulated-accept-length"
    if length is None:
        return
    if tree.topk > 1:
        raise ConfigError(f"{option} {length:g}: needs chains; use --speculative-eagle-topk 1")
    if not 1 <= length <= tree.steps + 1:
        raise ConfigError(
            f"{option} {length:g}: must be at least 1 and at most {tree.steps + 1}, the tokens that a step of "
            f"{tree.steps} drafts can yield; more need --speculative-num-steps"
        )
    record.remark(
        f"{option} {length:g}: drafts are accepted at random, answers are not the model's; for benchmarks only"
    )


def _check_window(args: EngineArgs, method: str) -> None:
    low, high = (getattr(args.speculative, name) for name in NGRAM_WINDOW)
    for name in NGRAM_WINDOW:
        value = getattr(args.speculative, name)
        if method != "ngram" and value != getattr(SpeculativeArgs, name):
            algorithm = args.speculative.speculative_algorithm
            raise ConfigError(f"{option_of(name)} {value} is for NGRAM, not for --speculative-algorithm {algorithm}")
        if value < 1:
            raise ConfigError(f"{option_of(name)} {value}: must be at least 1")
    if low > high:
        least, most = map(option_of, NGRAM_WINDOW)
        raise ConfigError(f"{least} {low} is more than {most} {high}; lower it, or raise {most}")
