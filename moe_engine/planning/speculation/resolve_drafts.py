"""Resolves the drafter and its draft model, with the rules of speculation over several attention groups."""

from __future__ import annotations

import dataclasses

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.planning.model.residual_streams import check_streams
from moe_engine.planning.model.resolve_dtype import with_latent_scales
from moe_engine.planning.model.sparse_attention import check_sparse
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.speculation.eagle_checks import check_sharding
from moe_engine.planning.speculation.resolve_speculation import DraftModel, resolve_speculation
from moe_engine.types import SpeculationConfig


def resolve_drafts(
    args: EngineArgs,
    model: ModelConfig,
    draft: DraftModel | None,
    context_len: int,
    parallel: ParallelPlan,
    device: str,
    record: Record,
) -> tuple[SpeculationConfig | None, DraftModel | None]:
    """The drafter, and its draft model or EAGLE head if it has one."""
    speculation = resolve_speculation(args, model, draft, context_len, record)
    _check_shared_drafts(speculation, parallel)
    _check_own_experts(speculation, model, parallel)
    configs = [model] if draft is None else [model, draft.config]
    check_sparse(args, configs, device, 1 if speculation is None else speculation.topk)
    check_streams(args, configs, has_head=draft is not None and draft.head is not None)
    if draft is None or draft.is_nextn or speculation is None or speculation.draft_model_path is None:
        return speculation, None
    if draft.head is not None:
        check_sharding(draft.head, parallel.topology)
        return speculation, draft  # its windows decide what a block sees for requests of any length
    return speculation, dataclasses.replace(draft, config=draft.config.within(context_len))


def with_draft_scales(args: EngineArgs, draft: DraftModel, kv_dtype: str, record: Record) -> DraftModel:
    """The draft model with its own checkpoint's scales of the latent. Raises ConfigError: as `with_latent_scales`."""
    own = with_latent_scales(args, draft.config, kv_dtype, draft.latent_scales, record)
    head = None if draft.head is None else dataclasses.replace(draft.head, layer=own)
    return dataclasses.replace(draft, config=own, head=head)


def _check_shared_drafts(speculation: SpeculationConfig | None, parallel: ParallelPlan) -> None:
    """With DP attention all groups run every draft forward together, so its sizes must be known beforehand."""
    groups = parallel.topology.attn_dp_size
    if speculation is not None and speculation.follows and groups > 1 and speculation.topk > 1:
        raise ConfigError(
            f"--speculative-eagle-topk {speculation.topk} with --attn-dp-size {groups}: draft trees need a "
            "single attention group; use --speculative-eagle-topk 1, or NGRAM"
        )


def _check_own_experts(speculation: SpeculationConfig | None, model: ModelConfig, parallel: ParallelPlan) -> None:
    """Draft layers may have another number of experts than the model's layers."""
    own, ranks = model.moe_of(model.num_layers), parallel.topology.ep_size
    if speculation is None or not speculation.uses_own_layers or own is None or own.num_experts % ranks == 0:
        return
    raise ConfigError(
        f"--ep-size {ranks}: the draft layers of {model.source} have {own.num_experts} experts, which cannot be "
        "divided evenly; use another --ep-size, or leave out --speculative-algorithm"
    )
