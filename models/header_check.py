"""Checks a checkpoint's headers against its config.json, before torch is imported or a weight read.

The same rules as the loader's, for all tensors together: one error lists the first few that are missing, have a wrong
shape or unsupported dtype, or belong to no layer. External models have their own tensor names and are not checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from moe_engine.errors import CheckpointError
from moe_engine.models import registry
from moe_engine.models.checkpoint.tensor_header import TensorHeader, WeightFile
from moe_engine.models.config import ModelConfig
from moe_engine.models.eagle_config import LM_HEAD, HeadConfig, head_tensors, names_outside_head
from moe_engine.models.formats.plain import integer_tensor, plain_tensor
from moe_engine.models.formats.protocol import StoredTensor, WeightFormat
from moe_engine.models.formats.schemes import SchemeFormat
from moe_engine.models.formats.table import format_in_headers, hint_for
from moe_engine.models.tensors.model import (
    Kind,
    TensorSpec,
    model_tensors,
    mtp_tensors,
    names_outside_model,
    names_outside_mtp,
)

MAX_SHOWN = 5
EMBEDDING = "model.embed_tokens.weight"
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Parts of a tied head, evenly spread, that are compared with those of the embedding."""


def with_stored_format(config: ModelConfig, files: Mapping[str, WeightFile]) -> ModelConfig:
    """The config; its quantized format is that of the files, where config.json does not say it."""
    if not isinstance(config.weight_format, SchemeFormat):
        return config
    return replace(config, weight_format=config.weight_format.with_stored(files))


def check_headers(
    directory: str | Path, files: Mapping[str, WeightFile], config: ModelConfig, include_mtp: bool = False
) -> None:
    """Compares names, shapes and dtypes.

    Args:
        directory: the checkpoint's, for messages.
        files: from `read_checkpoint`.
        include_mtp: check MTP layers too.

    Raises:
        CheckpointError: with file, tensor, expected and actual value.
    """
    if not registry.is_built_in(config.architecture):
        return
    check = _Check(files, format_in_headers(config.weight_format, files))
    problems = [problem for spec in model_tensors(config, include_mtp) for problem in check.problems(spec)]
    problems += _unexpected(files, config, include_mtp, check.known)
    problems += _untied_head(files, config)
    _raise(directory, problems)


def check_nextn_headers(directory: str | Path, files: Mapping[str, WeightFile], config: ModelConfig) -> None:
    """`check_headers` for an MTP layer exported on its own.

    Args:
        files: from `read_nextn`.
        config: of the model.
    """
    check = _Check(files, format_in_headers(config.weight_format, files))
    specs = (spec.within(f"model.layers.{config.num_layers}") for spec in mtp_tensors(config))
    problems = [problem for spec in specs for problem in check.problems(spec)]
    outside = names_outside_mtp(config, files)
    problems += [f"{name} belongs to no MTP layer" for name in sorted(files.keys() - check.known - outside)]
    _raise(directory, problems)


def check_head_headers(directory: str | Path, files: Mapping[str, WeightFile], head: HeadConfig) -> None:
    """`check_headers` for an EAGLE head.

    Args:
        files: from `read_head`.
    """
    check = _Check(files, format_in_headers(head.layer.weight_format, files))
    problems = [problem for spec in head_tensors(head) for problem in check.problems(spec)]
    if head.has_ids:
        problems += check.compare(integer_tensor("d2t", (head.own_head,)))
    outside = names_outside_head(head, files)
    problems += [f"{name} belongs to no part of {head.a_kind}" for name in sorted(files.keys() - check.known - outside)]
    _raise(directory, problems)


def _raise(directory: str | Path, problems: Sequence[str]) -> None:
    if not problems:
        return
    shown = "; ".join(problems[:MAX_SHOWN])
    more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
    raise CheckpointError(
        f"{directory}: {len(problems)} tensors do not match config.json: {shown}{more}; "
        "check that config.json belongs to these files and that no file is missing"
    )


class _Check:
    """Compares specs one by one; `known` collects the expected names."""

    def __init__(self, files: Mapping[str, WeightFile], format: WeightFormat) -> None:
        self._files = files
        self._format = format
        self.known: set[str] = set()

    def problems(self, spec: TensorSpec) -> Iterator[str]:
        for name in spec.names():
            for stored in self._stored(name, spec):
                yield from self.compare(stored)

    def _stored(self, name: str, spec: TensorSpec) -> tuple[StoredTensor, ...]:
        if spec.kind is Kind.LINEAR:
            return self._format.tensors(name.removesuffix(".weight"), spec.shape, self._files)
        return ((integer_tensor if spec.kind is Kind.INDEX else plain_tensor)(name, spec.shape),)

    def compare(self, stored: StoredTensor) -> Iterator[str]:
        name = stored.name
        self.known.add(name)
        file = self._files.get(name)
        if file is None:
            yield f"{name} {list(stored.shape)} is missing"
            return
        found = file.tensors[name]
        if not stored.fits(found.shape):
            yield f"{name} in {file.path.name} has shape {list(found.shape)}, not {list(stored.shape)}"
        if not stored.takes(found.dtype):
            accepted = ", ".join(stored.dtypes)
            yield f"{name} in {file.path.name} has dtype {found.dtype}{hint_for(found.dtype)}, not one of {accepted}"


def _unexpected(
    files: Mapping[str, WeightFile], config: ModelConfig, include_mtp: bool, known: set[str]
) -> Iterator[str]:
    outside = names_outside_model(config, files)
    if include_mtp:
        outside &= names_outside_mtp(config, files)
    for name in sorted(files.keys() - known - outside):
        file = files[name]
        if file.tensors[name].num_bytes:  # a projection of width 0 has no data and is not expected
            yield f"{name} in {file.path.name} belongs to no layer of the model"


def _untied_head(files: Mapping[str, WeightFile], config: ModelConfig) -> Iterator[str]:
    """A stored head that config.json ties to an embedding of other values, which would take its place."""
    if not config.tie_word_embeddings or config.pooling is not None or not {LM_HEAD, EMBEDDING} <= files.keys():
        return
    head, embedding = files[LM_HEAD], files[EMBEDDING]
    stored, tied = head.tensors[LM_HEAD], embedding.tensors[EMBEDDING]
    alike = (stored.dtype, stored.shape) == (tied.dtype, tied.shape)
    if alike and _samples(head, stored) != _samples(embedding, tied):
        yield (
            f"{LM_HEAD} in {head.path.name} differs from {EMBEDDING}, to which tie_word_embeddings ties it (if the "
            """head was trained, set --json-model-override-args '{"tie_word_embeddings": false}')"""
        )


def _samples(file: WeightFile, header: TensorHeader) -> list[bytes]:
    last = max(header.num_bytes - SAMPLE_BYTES, 0)
    with file.path.open("rb") as stream:
        parts = []
        for index in range(SAMPLES):
            stream.seek(header.start + last * index // (SAMPLES - 1))
            parts.append(stream.read(min(SAMPLE_BYTES, header.num_bytes)))
    return parts
