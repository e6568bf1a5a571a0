"""The indexer of DeepSeek sparse attention in config.json: DeepSeek V3.2, GLM-5. Imports no torch.

Layers that share a selection: `indexer_types`, else `index_topk_pattern`, else the schedule of `index_topk_freq` and
`index_skip_topk_offset`, as transformers reads the file (`glm_moe_dsa`).
"""

from __future__ import annotations

from dataclasses import replace

from moe_engine.models.config import IndexerConfig, MLAConfig
from moe_engine.models.config_sections.fields import Fields

_KINDS = {"full": False, "F": False, "shared": True, "S": True}
"""Name of a layer's indexer in the file: whether the layer uses another layer's selection."""


def parse_indexer(fields: Fields, attention: MLAConfig, from_input: bool = False) -> MLAConfig:
    """`attention` with its indexer. from_input: its queries do not come from the query's latent.

    Raises:
        ConfigError: fields contradict each other.
    """
    if attention.q_lora_rank is None and not from_input:
        fields.fail("q_lora_rank", "is missing; the indexer reads the query's latent")
    width = fields.integer("index_head_dim")
    if width & (width - 1) or width < attention.qk_rope_head_dim:
        at_least = f"at least qk_rope_head_dim {attention.qk_rope_head_dim}"
        fields.fail("index_head_dim", f"must be a power of two (Hadamard transform), {at_least}, found {width}")
    is_glm = fields.raw.get("model_type") == "glm_moe_dsa"
    indexer = IndexerConfig(
        num_heads=fields.integer("index_n_heads"),
        top_k=fields.integer("index_topk"),
        interleaved=fields.flag("indexer_rope_interleave", is_glm),
        shared_layers=_shared_layers(fields),
        shares_drafts=fields.flag("index_share_for_mtp_iteration", False),
        from_input=from_input,
    )
    return replace(attention, index_width=width, indexer=indexer)


def _shared_layers(fields: Fields) -> tuple[int, ...]:
    layers = fields.integer("num_hidden_layers")
    name = "indexer_types" if fields.has("indexer_types") else "index_topk_pattern"
    kinds = fields.raw.get(name)
    if kinds is None:
        frequency = fields.integer("index_topk_freq", 1)
        offset = fields.integer("index_skip_topk_offset", 2, minimum=0)
        shared = [max(i - offset + 1, 0) % frequency != 0 for i in range(layers)]
    else:
        if not isinstance(kinds, list | str) or len(kinds) < layers or not all(kind in list(_KINDS) for kind in kinds):
            fields.fail(name, f"needs {layers} of {', '.join(_KINDS)}, not {kinds!r}")
        shared = [_KINDS[kind] for kind in kinds[:layers]]
    if shared[0]:
        fields.fail(name, "layer 0 has no layer before it whose selection it could use")
    return tuple(i for i, without in enumerate(shared) if without)
