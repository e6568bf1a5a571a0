"""The step costs of a launch of this engine on other hardware, for the simulator."""

from __future__ import annotations

from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.parallel.topology import Topology
from moe_engine.tuning.costs.efficiency import deviation_keys, load_efficiency
from moe_engine.tuning.costs.form import Form, precision_of
from moe_engine.tuning.costs.model_facts import model_facts
from moe_engine.tuning.costs.roofline import RooflineCost
from moe_engine.tuning.hardware.table import parse_cluster


def form_of(topology: Topology, redundant: int = 0, overlap: bool = False) -> Form:
    """The ranks of a replica. redundant: redundant experts; overlap: two-batch overlap."""
    return Form(
        topology.tp_size, topology.attn_dp_size, topology.ep_size, topology.travels, redundant, overlap,
        not topology.cuts_dense,
    )  # fmt: skip


def step_costs(
    model: ModelConfig,
    form: Form,
    hardware: str,
    interconnect: str | None = None,
    like: str = "moe-engine",
    kv_cache_dtype: str = "auto",
) -> RooflineCost:
    """A `StepCostModel`.

    Args:
        hardware: ``h200`` or ``16xH200``, or a TOML file. interconnect: name or file; None: the GPU's own.
        like: engine whose efficiency counts.
        kv_cache_dtype: as --kv-cache-dtype.

    Raises:
        ConfigError: unknown hardware, network or engine; a model without the fields of its config.json.
    """
    if model.raw is None:
        raise ConfigError(f"{model.source}: the fields of config.json are not known; load it with load_model_config")
    facts, cluster = model_facts(model.raw, model.source), parse_cluster(hardware, interconnect)
    share = load_efficiency(like)
    kv = share.kv if kv_cache_dtype == "auto" else "fp8" if kv_cache_dtype.startswith("fp8") else "bf16"
    precision = precision_of(facts.stored_dtype, kv)
    keys = deviation_keys(facts, precision, cluster.gpu_key, form)
    return RooflineCost(facts, form, precision, cluster, share, share.deviation(keys))
