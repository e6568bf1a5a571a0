"""The properties that two servers must share before one uses KV of the other."""

from __future__ import annotations

from moe_engine.models.eagle_config import HeadConfig
from moe_engine.planning.output.weights_identity import weights_identity
from moe_engine.planning.resolved_config import ResolvedConfig

VERSION = 3
"""Version of the messages and of the format of a KV row."""


def cache_schema(config: ResolvedConfig) -> dict[str, str]:
    """Everything that determines the bytes of a token's KV, by name. Page sizes and pool sizes may differ.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    model, speculation, head = config.model, config.speculation, config.draft_head
    own = speculation is not None and speculation.uses_own_layers
    layers = len(model.kv_layers)
    scaled = " scaled" if model.latent_scales else ""
    parts = (str(kind.kv_parts(config.kv_cache_dtype)) for kind in model.attentions)
    return {
        "version": str(VERSION),
        "architecture": model.architecture,
        "layers": str(layers),
        "draft layers": str(model.num_nextn_predict_layers if own else 0),
        "states": _of_states(config),
        "contributions to entries": _of_entries(config),
        "EAGLE head": "none" if head is None else _of_head(head, config),
        "cache": f"{model.attention.kind} {' '.join(parts)}{scaled}",
        "--kv-cache-dtype": config.kv_cache_dtype,
        "vocabulary": str(model.vocab_size),
        "weights": weights_identity(config),
        "--disaggregation-transfer-backend": config.args.disaggregation.disaggregation_transfer_backend,
        "--quantization": str(model.quantization) if hasattr(model, "quantization") else "",
    }


def _of_entries(config: ResolvedConfig) -> str:
    """What pages have of the tokens before the next entry, which depends on the number of drafts."""
    drafts, model = config.limits.draft_slots, config.model
    kept = filter(None, (model.kept_rows(i, drafts) for i in range(model.num_layers)))
    of_blocks = sorted({(rows.each, rows.block) for rows in kept if rows.block})
    return ", ".join(f"of {each} tokens in {block}" for each, block in of_blocks) or "none"


def _of_states(config: ResolvedConfig) -> str:
    """States of prefixes. A rank receives them from the rank with its own number, at the end of a page."""
    parts = [(part.shape, part.dtype) for group in config.model.state_groups for part in group.parts]
    if not parts:
        return "none"
    ranks = config.parallel.topology.attn_tp_size
    return f"{parts} on {ranks} rank{'s' * (ranks > 1)}, --page-size {config.page_size}"


def _of_head(head: HeadConfig, config: ResolvedConfig) -> str:
    """KV of the MTP head. Its heads are divided over the ranks differently from the model's, so both servers need equal
    rank counts."""
    ranks = config.parallel.topology.attn_tp_size
    layers = f"{head.layer.num_layers} x " if head.layer.num_layers > 1 else ""
    return f"{layers}{head.layer.attention.kv_parts(config.kv_cache_dtype)} on {ranks} rank{'s' * (ranks > 1)}"


def difference(prefill: dict[str, str], decode: dict[str, str]) -> str | None:
    """The first difference in words, with both sides; None if there is none."""
    for name in sorted(prefill.keys() | decode.keys()):
        ours, theirs = prefill.get(name, "missing"), decode.get(name, "missing")
        if ours != theirs:
            return f"{name}: prefill server {ours}, decode server {theirs}"
    return None
