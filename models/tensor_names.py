"""The tensors of a served model by the names of its checkpoint, for calls that name some of them. Imports no torch."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping

from moe_engine.errors import CheckpointError, InputError
from moe_engine.models.checkpoint.tensor_header import WeightFile
from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.block_fp8 import SCALE_ENDS
from moe_engine.models.formats.plain import integer_tensor, plain_tensor
from moe_engine.models.formats.protocol import StoredTensor, WeightFormat
from moe_engine.models.formats.table import format_in_headers, hint_for
from moe_engine.models.tensors.model import (
    EMBEDDING,
    Kind,
    layer_index,
    model_tensors,
    names_outside_model,
    table_names,
    unread_in_mtp,
)

MAX_SHOWN = 5


class TensorNames:
    """Args:
    include_mtp: the MTP layers are loaded too.
    """

    def __init__(self, config: ModelConfig, include_mtp: bool) -> None:
        self._config, self._include_mtp = config, include_mtp
        self._specs = {name: spec for spec in model_tensors(config, include_mtp) for name in spec.names()}

    def resolve(self, name: str) -> tuple[str, tuple[int, ...]]:
        """The name under which a tensor is loaded (a tied head: the embedding's), and its shape.

        Raises:
            InputError: unknown; with similar names.
        """
        if name == "lm_head.weight" and self._config.tie_word_embeddings and self._config.pooling is None:
            name = EMBEDDING
        if (spec := self._specs.get(name)) is not None:
            return name, spec.shape
        if (weight := self._scaled_by(name)) is not None:
            spec = self._specs[weight]
            stored = self._config.weight_format.tensors(weight.removesuffix(".weight"), spec.shape, {name, weight})
            if len(stored) > 1:
                return name, stored[1].shape
        raise InputError(self._unknown(name), field="name")

    def check(self, source: str, files: Mapping[str, WeightFile]) -> set[str]:
        """Compares names, shapes and dtypes of some tensors with the model. Returns the names of the model's tensors in
        them.

        Raises:
            CheckpointError: names the tensors at fault.
        """
        found = format_in_headers(self._config.weight_format, files)
        problems, read, unread = [], set(), names_outside_model(self._config, files)
        unread -= {name for name in table_names(files) if not name.startswith("model.layers.")}
        of_forms = self._matrices_in(found, files)
        for name in sorted(files):
            if self._is_unread_draft(name) if layer_index(name) >= self._config.num_layers else name in unread:
                continue
            spec = self._specs.get(name)
            if spec is None:
                problems += self._of_form(name, files, of_forms.get(name, {}))
                read |= {name, *of_forms.get(name, ())}
                continue
            read.add(name)
            by_kind = integer_tensor if spec.kind is Kind.INDEX else plain_tensor
            stored: tuple[StoredTensor, ...] = (by_kind(name, spec.shape),)
            if spec.kind is Kind.LINEAR:
                stored = found.tensors(name.removesuffix(".weight"), spec.shape, files)
            problems += _compare(name, files[name], stored)
        if problems:
            more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
            raise CheckpointError(f"{source}: {'; '.join(problems[:MAX_SHOWN])}{more}")
        return read

    def _matrices_in(
        self, found: WeightFormat, files: Mapping[str, WeightFile]
    ) -> dict[str, dict[str, tuple[StoredTensor, ...]]]:
        """Of stored tensors with other names than the model's (scales, all experts of a layer): the matrices in each,
        with all tensors of a matrix."""
        matrices: dict[str, dict[str, tuple[StoredTensor, ...]]] = defaultdict(dict)
        layers = {layer_index(name) for name in files.keys() - self._specs.keys()}
        for name, spec in self._specs.items() if layers else ():
            if spec.kind is Kind.LINEAR and layer_index(name) in layers:
                stored = found.tensors(name.removesuffix(".weight"), spec.shape, files)
                for part in stored:
                    matrices[part.name][name] = stored
        return matrices

    def _of_form(
        self, name: str, files: Mapping[str, WeightFile], matrices: Mapping[str, tuple[StoredTensor, ...]]
    ) -> list[str]:
        """Problems of a stored tensor with another name than the model's, which has parts of these matrices."""
        weight = self._scaled_by(name)
        stored = next(iter(matrices.values()), ())
        if missing := [part.name for part in stored if part.name not in files]:
            return [f"{name} comes without {missing[0]}; send both"]
        if weight is not None and not stored and weight not in files:
            return [f"{name} comes without {weight}; send both"]
        return _compare(name, files[name], stored) if stored or weight else [self._unknown(name)]

    def _scaled_by(self, name: str) -> str | None:
        """The weight that the scales with this name belong to."""
        if name in self._specs:
            return None
        for suffix in SCALE_ENDS:
            weight = name.removesuffix(suffix) + ".weight"
            if name.endswith(suffix) and weight in self._specs and self._specs[weight].kind is Kind.LINEAR:
                return weight
        return None

    def _is_unread_draft(self, name: str) -> bool:
        """True for tensors of layers after the model's that the served model does not use."""
        config, index = self._config, layer_index(name)
        stop = config.num_layers + config.num_nextn_predict_layers
        if index >= max(stop, config.stored_layers):
            return False
        return not self._include_mtp or index >= stop or name.endswith(unread_in_mtp(config))

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self._near(name), 3, 0.5)
        hint = f"; similar: {', '.join(near)}" if near else ""
        return f"{name!r:.200} is no tensor of the served model{hint}"

    def _near(self, name: str) -> list[str]:
        """Names to compare with: those of the same layer, if any. Comparing with all names would take seconds."""
        index = layer_index(name)
        same = [known for known in self._specs if layer_index(known) == index]
        return (same or [known for known in self._specs if layer_index(known) in (-1, 0)])[:1000]


def _compare(name: str, file: WeightFile, stored: tuple[StoredTensor, ...]) -> list[str]:
    wanted = next((tensor for tensor in stored if tensor.name == name), None)
    header = file.tensors[name]
    if wanted is None:
        return [f"{name}: scales of a weight that is not quantized"]
    if not wanted.fits(header.shape):
        return [f"{name} has shape {list(header.shape)}, not {list(wanted.shape)}"]
    if not wanted.takes(header.dtype):
        return [f"{name} has dtype {header.dtype}{hint_for(header.dtype)}, not one of {', '.join(wanted.dtypes)}"]
    return []
