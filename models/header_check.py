"""Checks a checkpoint's headers against its config.json, before torch is imported or a weight read.

The same rules as the loader's, for all tensors at once: one error lists the first few that are missing, have a wrong
shape or unsupported dtype, or belong to no layer. External models have their own tensor names and are not checked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from moe_engine.errors import CheckpointError
from moe_engine.models import registry
from moe_engine.models.checkpoint_files import WeightFile
from moe_engine.models.config import ModelConfig
from moe_engine.models.tensors import (
    FLOATS,
    FP8,
    SCALES,
    Kind,
    TensorSpec,
    model_tensors,
    names_outside_model,
    names_outside_mtp,
    scale_of,
)

DEFAULT_BLOCK = (128, 128)
MAX_SHOWN = 5


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
    check = _Check(files, config.quant.block if config.quant is not None else DEFAULT_BLOCK)
    problems = [problem for spec in model_tensors(config, include_mtp) for problem in check.problems(spec)]
    problems += _unexpected(files, config, include_mtp, check.known)
    if problems:
        shown = "; ".join(problems[:MAX_SHOWN])
        more = f"; and {len(problems) - MAX_SHOWN} more" if len(problems) > MAX_SHOWN else ""
        raise CheckpointError(
            f"{directory}: {len(problems)} tensors do not match config.json: {shown}{more}; "
            "check that config.json belongs to these files and that no file is missing"
        )


class _Check:
    """Compares specs one by one; `known` collects the expected names."""

    def __init__(self, files: Mapping[str, WeightFile], block: tuple[int, int]) -> None:
        self._files = files
        self._block = block
        self.known: set[str] = set()

    def problems(self, spec: TensorSpec) -> Iterator[str]:
        for name in spec.names():
            scale = scale_of(name, self._files) if spec.kind is Kind.LINEAR else None
            yield from self._compare(name, spec.shape, FLOATS if scale is None else (*FP8, *FLOATS))
            if scale is not None:
                grid = tuple(-(-size // block) for size, block in zip(spec.shape, self._block))
                yield from self._compare(scale, grid, SCALES)

    def _compare(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> Iterator[str]:
        self.known.add(name)
        file = self._files.get(name)
        if file is None:
            yield f"{name} {list(shape)} is missing"
            return
        found = file.tensors[name]
        if found.shape != shape:
            yield f"{name} in {file.path.name} has shape {list(found.shape)}, not {list(shape)}"
        if found.dtype not in dtypes:
            hint = " (block FP8 needs a weight_scale_inv beside it)" if found.dtype in FP8 else ""
            yield f"{name} in {file.path.name} has dtype {found.dtype}{hint}, not one of {', '.join(dtypes)}"


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
