"""Pooled models: the computation of a request's vector from its hidden states, from config.json and
sentence-transformers' files. Imports no torch.

A model is pooled if its architecture has no language-model head, or with --is-embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_engine.errors import ConfigError, NotAvailableYet
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.fields import Fields, read_json
from moe_engine.models.config_sections.pooling import PoolingConfig

HEADS = {
    "LlamaForSequenceClassification": "linear",
    "Qwen2ForSequenceClassification": "linear",
    "Qwen3ForSequenceClassification": "linear",
    "Qwen2ForRewardModel": "mlp",
}
"""Architectures with a score head, and the head's kind: one matrix, or two with a bias and ReLU between them."""
HEADLESS = ("LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model")
"""Architectures of checkpoints that were saved without a head."""
DEFAULT_LABELS = 2
"""Number of labels of a classifier whose config.json has no id2label, as in transformers."""

_MODULES = "modules.json"
_MODES = {
    "pooling_mode_lasttoken": "last", "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean", "mean": "mean",
    "pooling_mode_cls_token": "cls", "cls": "cls",
}  # fmt: skip
"""sentence-transformers' names of the supported modes, of older and newer files."""


@dataclass(frozen=True)
class ScoreLayer:
    """A matrix of the score head."""

    name: str
    rows: int
    columns: int
    bias: bool


def with_pooling(config: ModelConfig, is_embedding: bool) -> ModelConfig:
    """The config with its `pooling`, if its model is pooled.

    Args:
        is_embedding: whether a model with a language-model head is pooled too.

    Raises:
        ConfigError: the checkpoint's files require a computation that this engine does not have.
    """
    head = HEADS.get(config.architecture, "")
    if not (head or is_embedding or config.architecture in HEADLESS):
        return config
    raw = config.raw or {}
    if raw.get("is_causal") is False:
        raise NotAvailableYet(
            f"{config.source}: is_causal false: attention to later tokens is not available yet; to serve the model "
            "with causal attention, as SGLang does, pass --json-model-override-args '{\"is_causal\": true}'"
        )
    if head:
        labels = _labels(Fields(raw, config.source)) if head == "linear" else ("LABEL_0",)
        found = PoolingConfig("last", False, len(labels), head, labels)
    else:
        kind, normalizes = _sentence_transformer(Path(config.source).parent)
        found = PoolingConfig(kind, normalizes, config.hidden_size, dimensions=_dimensions(config))
    return dataclasses.replace(config, pooling=found)


def score_layers(config: ModelConfig) -> Iterator[ScoreLayer]:
    """The matrices of the score head, in order; none without such a head."""
    pooling, width = config.pooling, config.hidden_size
    if pooling is None or not pooling.head:
        return
    if pooling.head == "linear":
        yield ScoreLayer("score", pooling.width, width, bias=False)
        return
    yield ScoreLayer("score.0", width, width, bias=True)
    yield ScoreLayer("score.2", pooling.width, width, bias=True)


def _labels(fields: Fields) -> tuple[str, ...]:
    """The names of the classes."""
    names = fields.section("id2label")
    if names is None or not names.raw:
        return tuple(f"LABEL_{i}" for i in range(fields.integer("num_labels", DEFAULT_LABELS)))
    found = {str(index): str(name) for index, name in names.raw.items()}
    missing = [i for i in range(len(found)) if str(i) not in found]
    if missing:
        fields.fail("id2label", f"has {len(found)} classes and no class {missing[0]}")
    return tuple(found[str(i)] for i in range(len(found)))


def _dimensions(config: ModelConfig) -> tuple[int, ...]:
    """The lengths to which a vector may be cut, if config.json lists them; empty: any."""
    given: Any = (config.raw or {}).get("matryoshka_dimensions")
    return tuple(sorted(int(d) for d in given if isinstance(d, int))) if isinstance(given, list) else ()


def _sentence_transformer(folder: Path) -> tuple[str, bool]:
    """How the token states are pooled, and whether the vector is normalized. Without sentence-transformers' files: the
    last token, normalized, as in SGLang.

    Raises:
        ConfigError: a module or a mode that this engine does not compute.
    """
    file = folder / _MODULES
    if not file.is_file():
        return "last", True
    kind, normalizes = "", False
    for module in _modules(file):
        name = str(module.get("type", "")).rpartition(".")[2]
        if name == "Pooling":
            kind = _mode(folder / str(module.get("path", "")) / "config.json")
        elif name == "Normalize":
            normalizes = True
        elif name != "Transformer":
            raise NotAvailableYet(f"{file}: module {name or module} is not available yet; known: Pooling, Normalize")
    if not kind:
        raise ConfigError(f"{file}: has no Pooling module, so a text has no vector; add it, or remove the file")
    return kind, normalizes


def _modules(file: Path) -> list[dict[str, Any]]:
    listed = read_json(file, list)
    if not all(isinstance(module, dict) for module in listed):
        raise ConfigError(f"{file}: must be a list of objects")
    return listed


def _mode(file: Path) -> str:
    fields = read_json(file)
    named = fields.get("pooling_mode")
    modes = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(named, str):
        modes = [named]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise NotAvailableYet(
            f"{file}: pooling by {' and '.join(modes) or 'no mode'} is not available yet; known: lasttoken, "
            "mean_tokens, cls_token"
        )
    return _MODES[modes[0]]
