"""LoRA adapters in PEFT's format: adapter_config.json and the header of adapter_model.safetensors. Imports no torch.

PEFT names the tensors of a module ``base_model.model.<module>.lora_A.weight`` [r, K] and ``.lora_B.weight`` [N, r];
the adapted product is W x + scaling * B (A x).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.errors import CheckpointError, ConfigError
from moe_engine.models.checkpoint.regular_file import check_regular
from moe_engine.models.checkpoint.safetensors_header import read_header
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.checkpoint_names.llama4_names import inner_name
from moe_engine.models.config import ModelConfig
from moe_engine.models.tensors.model import Kind, layer_tensors

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
INNER = ("model.language_model.", "language_model.model.")
"""Prefixes of the text model's modules in a model for images and text, by transformers and as published."""
MAX_SHOWN = 3
TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate_proj",
    "up_proj", "down_proj",
)  # fmt: skip
"""Last parts of module names that can have an adapter: `--lora-target-modules`."""
_JOINED = "q_proj", "k_proj", "v_proj"
"""Parts of one product whose rows are ordered by heads, in layers of delta attention: they have no adapters."""

_REFUSED = {
    "use_dora": "DoRA (weight-decomposed adapters)",
    "modules_to_save": "fully trained modules",
    "trainable_token_indices": "trained embeddings",
    "target_parameters": "adapters of parameters instead of modules",
    "megatron_config": "Megatron's layers",
    "lora_bias": "biases of adapters",
    "fan_in_fan_out": "transposed weights",
    "layer_replication": "replicated layers",
    "use_qalora": "QALoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "arrow routing",
}


@dataclass(frozen=True)
class AdapterModule:
    """An adapted module of the model: its name, here and in the adapter's file, rank, scaling, and its weight's shape
    (N, K)."""

    name: str
    stored: str
    rank: int
    scaling: float
    shape: tuple[int, int]

    @property
    def target(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Adapter:
    """An adapter that fits its model."""

    path: Path
    modules: tuple[AdapterModule, ...]
    file: WeightFile

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(module.rank for module in self.modules)

    @property
    def targets(self) -> frozenset[str]:
        return frozenset(module.target for module in self.modules)

    def tensor(self, module: AdapterModule, part: str) -> str:
        """Name of the tensor ``A`` or ``B`` of a module."""
        return f"{module.stored}.lora_{part}.weight"


def linear_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape (N, K) of each module of the model that can have an adapter, by name."""
    shapes = {}
    for index, is_moe in enumerate(config.moe_layers):
        joined = _JOINED if index in config.state_layers else ()
        for spec in layer_tensors(config, is_moe, index):
            name = spec.name.removesuffix(".weight")
            target = name.rpartition(".")[2]
            if spec.kind is Kind.LINEAR and "*" not in name and target in TARGETS and target not in joined:
                shapes[f"model.layers.{index}.{name}"] = (spec.shape[0], spec.shape[1])
    return shapes


def read_adapter(path: str | Path, config: ModelConfig) -> Adapter:
    """Reads an adapter's configuration and header, and compares them with the model.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the model; names file, tensor and field.
        ConfigError: the adapter uses something that is not available; names the field.
    """
    folder = Path(path).expanduser()
    fields = _read_config(folder)
    _refuse(fields, folder / CONFIG_FILE)
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise CheckpointError(f"{folder}: no {WEIGHTS_FILE}; adapters are read in PEFT's format with safetensors")
    header = read_header(weights)
    modules = tuple(_modules(header, fields, config, weights))
    if not modules:
        raise CheckpointError(f"{weights}: no tensors of adapters (lora_A, lora_B)")
    return Adapter(folder, modules, WeightFile(weights, header))


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    try:
        check_regular(file)
        fields = json.loads(file.read_text())
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise CheckpointError(f"{file}: {reason}; a LoRA adapter is a folder that PEFT has saved") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return fields


def _refuse(fields: Mapping[str, Any], file: Path) -> None:
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise ConfigError(f"{file}: peft_type {kind!r}: only LORA is available")
    if (bias := fields.get("bias", "none")) != "none":
        raise ConfigError(f"{file}: bias {bias!r}: trained biases are not available; only 'none'")
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise ConfigError(f"{file}: {name} {fields[name]!r:.80}: {what} are not available; train without")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise CheckpointError(f"{file}: r {rank!r}: expected a positive integer")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise CheckpointError(f"{file}: lora_alpha {alpha!r}: expected a number")


def _modules(
    header: Mapping[str, Any], fields: Mapping[str, Any], config: ModelConfig, file: Path
) -> Iterator[AdapterModule]:
    shapes = linear_shapes(config)
    names: dict[str, set[str]] = {}
    for tensor in header:
        match = re.fullmatch(r"(.+)\.lora_([AB])\.weight", tensor)
        if match is None:
            raise ConfigError(f"{file}: tensor {tensor}: {_why_not(tensor)}")
        names.setdefault(match[1], set()).add(match[2])
    modules: dict[str, str] = {}
    for stored in names:
        other = modules.setdefault(_module_name(stored), stored)
        if other != stored:
            first, second = (f"{one}.lora_{min(names[one])}.weight" for one in (other, stored))
            raise CheckpointError(
                f"{file}: tensors {first} and {second} are of the same module, {_module_name(stored)}; keep one of them"
            )
    wrong = [name for name in modules if name not in shapes]
    if wrong:
        more = f", and {len(wrong) - MAX_SHOWN} more" if len(wrong) > MAX_SHOWN else ""
        raise ConfigError(f"{file}: {', '.join(wrong[:MAX_SHOWN])}{more}: {_why_not(wrong[0])}")
    for name, stored in sorted(modules.items()):
        if names[stored] != {"A", "B"}:
            raise CheckpointError(f"{file}: {name} has lora_{min(names[stored])} alone")
        a, b = (header[f"{stored}.lora_{part}.weight"].shape for part in "AB")
        out_features, in_features = shapes[name]
        rank = _pattern(fields.get("rank_pattern"), name, fields["r"])
        if a != (rank, in_features) or b != (out_features, rank):
            raise CheckpointError(
                f"{file}: {name} has lora_A {list(a)} and lora_B {list(b)}, expected [{rank}, {in_features}] and "
                f"[{out_features}, {rank}] for rank {rank} and this model"
            )
        alpha = _pattern(fields.get("alpha_pattern"), name, fields["lora_alpha"])
        scaling = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
        yield AdapterModule(name, stored, rank, scaling, shapes[name])


def _module_name(stored: str) -> str:
    """The served model's name of a module, also of the text model inside a model for images and text."""
    name = inner_name(stored.removeprefix(PREFIX))
    inner = next((prefix for prefix in INNER if name.startswith(prefix)), None)
    return name if inner is None else f"model.{name.removeprefix(inner)}"


def _pattern(patterns: Any, name: str, default: Any) -> Any:
    """PEFT's rank_pattern and alpha_pattern: the value of the first key that a module's name ends with."""
    for key, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default


def _why_not(name: str) -> str:
    if ".experts." in name:
        return "adapters of routed experts are not available; adapt attention, dense layers or shared experts"
    if "lm_head" in name or "embed_tokens" in name:
        return "adapters of the embedding and of lm_head are not available"
    if re.search(r"\.(gate|block_sparse_moe\.gate)(\.|$)", name):
        return "adapters of the router are not available"
    if "lora_magnitude" in name:
        return "DoRA (weight-decomposed adapters) is not available"
    able = f"{', '.join(TARGETS)}; of delta attention o_proj alone"
    return f"not a module of this model that can have an adapter ({able})"
